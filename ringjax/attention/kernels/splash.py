"""Block attention for TPUs by Splash, the Pallas kernel that jax ships."""

from dataclasses import dataclass
from functools import partial
from math import frexp, prod

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.attention.kernels import jax_private
from ringjax.attention.kernels.base import BlockKernel, Gradients, Order, Relation
from ringjax.attention.kernels.guard import checked_by_jax, guarded, insist
from ringjax.attention.kernels.jax_private import SplashTables
from ringjax.attention.kernels.tpu import TpuKernel
from ringjax.attention.scores import ScoreRule
from ringjax.attention.softmax import Partial, merge

LANES = 128
# Its tables of tiles lie in the scalar memory of a core.
MOST_SLOTS = 2**16


@dataclass(frozen=True)
class SplashKernel(BlockKernel):
    """Splash attention: full, causal and window masks between slots, documents, softcap.

    Splash gives out and dq in the dtype of q, dk and dv in that of k and v. Those are handed over in float32, so that
    nothing is rounded before it is merged; the matrix units take the same numbers from them as from bfloat16. No
    memory of the caller's is written to, the merge is a pass of its own, and the log-sum-exp comes in 128 copies.

    Attributes:
      tile: most queries, and most keys, of a tile; a multiple of 128.
      exact: the kernel that does a call again in which something is not finite.
      interpret: run step by step in plain jax, on any backend: for tests.
    """

    tile: int = 512
    exact: BlockKernel = TpuKernel()  # noqa: RUF009 (frozen)
    interpret: bool = False
    name = "splash"

    @property
    def check_vma(self) -> bool:
        return False

    def refusal(self, q, kv, relation, rule) -> str | None:
        dim, value_dim, (q_len, k_len) = q.shape[-1], kv.shape[-1] - q.shape[-1], (q.shape[3], kv.shape[2])
        if q.dtype == jnp.float16:
            return "TPUs know no float16"
        if q.dtype == jnp.float32 and not self.interpret:
            return "it rounds float32 to bfloat16 inside"
        if dim % 64 or value_dim % 64:
            return f"D and Dv must be multiples of 64; got {dim} and {value_dim}"
        if q_len % LANES or k_len % LANES or max(q_len, k_len) > MOST_SLOTS:
            return (
                f"numbers of queries and keys must be multiples of {LANES}, up to {MOST_SLOTS}; got {q_len}, {k_len}"
            )
        return _unmet(relation, rule) or checked_by_jax(q, kv) or jax_private.splash_problem()

    def forward(self, q, kv, relation, rule, heads, before, q_slots, k_slots) -> Partial:
        of_slots = (q_slots.take(q, 3), k_slots.take(kv, 2))
        insist(self, *of_slots, relation, rule)

        def again() -> Partial:
            return self.exact.forward(q, kv, relation, rule, heads, before, q_slots, k_slots)

        rows, (q_BHLD, k, v) = of_slots[0].shape[:4], self._arrays(*of_slots, rule)
        options = self._options(relation, rule, rows[3], k.shape[2], keys_stay=False)
        attend = partial(jax_private.splash_forward, **options)
        out, lse = _over_sequences(attend, relation, q_BHLD.astype(jnp.float32), k, v)
        # A row that sees nothing has the lse of scores of -1e38 and the mean of values it may not see.
        none = lse < -1e38
        out, lse = jnp.where(none[..., None], 0.0, out), jnp.where(none, -jnp.inf, lse)
        merged = merge(
            Partial(*(q_slots.take(x, 3) for x in before)), Partial(out.reshape(*rows, -1), lse.reshape(rows))
        )
        result = Partial(*(q_slots.put(x, new, 3) for x, new in zip(before, merged, strict=True)))
        return guarded(result, of_slots, again)

    def backward(self, q, kv, relation, rule, heads, lse, delta, dout, before, q_slots, k_slots) -> Gradients:
        of_rows = [q_slots.take(x, 3) for x in (lse, delta, dout)]
        of_slots = (q_slots.take(q, 3), k_slots.take(kv, 2))
        insist(self, *of_slots, relation, rule)

        def again() -> Gradients:
            rows = (lse, delta, dout)
            return self.exact.backward(q, kv, relation, rule, heads, *rows, before, q_slots, k_slots)

        # Rows that see nothing have an lse of -inf: with +inf their weights are 0.
        of_rows[0] = jnp.where(jnp.isneginf(of_rows[0]), jnp.inf, of_rows[0])
        rows, (q_BHLD, k, v) = of_slots[0].shape, self._arrays(*of_slots, rule)
        lse_BHL, delta_BHL, dout_BHLD = (_by_head(x) for x in of_rows)
        options = self._options(relation, rule, rows[3], k.shape[2], keys_stay=False)
        dq = _over_sequences(
            partial(jax_private.splash_dq, **options),
            *(relation, q_BHLD.astype(jnp.float32), k, v, lse_BHL, delta_BHL, dout_BHLD),
        )
        options = self._options(relation, rule, rows[3], k.shape[2], keys_stay=True)
        dkv = _over_sequences(
            partial(jax_private.splash_dkv, **options),
            *(relation, q_BHLD, k.astype(jnp.float32), v.astype(jnp.float32), lse_BHL, delta_BHL, dout_BHLD),
        )
        dq, dkv = dq.reshape(rows) * rule.scale, jnp.concatenate(dkv, axis=-1)
        result = Gradients(
            q_slots.put(before.dq, q_slots.take(before.dq, 3) + dq, 3),
            k_slots.put(before.dkv, k_slots.take(before.dkv, 2) + dkv, 2),
        )
        finite_rows = (jnp.where(jnp.isinf(of_rows[0]), 0.0, of_rows[0]), *of_rows[1:])
        return guarded(result, (*of_slots, *finite_rows), again)

    def _arrays(self, q: jax.Array, kv: jax.Array, rule: ScoreRule) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Scaled queries [B, H, Lq, D], keys [B, K, Lk, D] and values."""
        k, v = jnp.split(kv, [q.shape[-1]], axis=-1)
        return _by_head(q) * jnp.asarray(rule.scale, q.dtype), k, v

    def _options(self, relation: Relation, rule: ScoreRule, q_len: int, k_len: int, keys_stay: bool) -> dict:
        tiles = _tile(q_len, self.tile), _tile(k_len, self.tile)
        return {
            "tables": _tables(relation, (q_len, k_len), tiles, keys_stay),
            "tiles": tiles,
            "softcap": rule.softcap,
            "interpret": self.interpret,
        }


def _unmet(relation: Relation, rule: ScoreRule) -> str | None:
    """What a call asks for that Splash does not do, or not exactly."""
    if frexp(rule.scale)[0] != 0.5:
        return f"it has no scale, and queries times {rule.scale:.6g} would be rounded: it must be a power of two"
    if rule.alibi or rule.dropout:
        return "it knows no ALiBi and no dropout"
    if relation.order is Order.ANY:
        return "it knows no positions that are data, and no prefix"
    if relation.order is Order.SLOTS and relation.lead.low != relation.lead.high:
        return "how far queries are ahead of keys must be known when the program is built"
    return None


def _distances(relation: Relation) -> tuple[int, int] | None:
    """The interval of query slot minus key slot that is visible; None = all."""
    if relation.order is Order.ALL or relation.mask.is_full:
        return None
    (low, high), lead = relation.mask.differences, relation.lead
    return -((lead.low - low) // lead.stride), (high - lead.low) // lead.stride


def _tables(
    relation: Relation, lengths: tuple[int, int], tiles: tuple[int, int], keys_stay: bool
) -> SplashTables | None:
    """What Splash reads to skip what is hidden."""
    distances = _distances(relation)
    if distances is None:
        return None
    low, high = max(distances[0], -lengths[1]), min(distances[1], lengths[0])
    q_first, k_first = (np.arange(0, length, tile) for length, tile in zip(lengths, tiles, strict=True))
    # Distances between two tiles run from the last key and first query to the first key and last query.
    nearest = q_first[:, None] - (k_first + tiles[1] - 1)
    furthest = q_first[:, None] + tiles[0] - 1 - k_first
    needed = (furthest >= low) & (nearest <= high) & (low <= high)
    needed = needed.T if keys_stay else needed
    steps = max(1, needed.sum(1).max())
    # The needed ones first; after them the last one again, for which nothing is fetched.
    order = np.argsort(~needed, axis=1, kind="stable")[:, :steps].astype(np.int32)
    count = needed.sum(1)[:, None]
    last = np.take_along_axis(order, np.maximum(count - 1, 0), 1)
    real = np.arange(steps) < count
    comes, needed = np.where(real, order, last), np.where(real, 2, 0).astype(np.int32)

    def sees(q, k):
        return (q - k >= low) & (q - k <= high)

    return SplashTables(comes.T, needed.T, sees) if keys_stay else SplashTables(comes, needed, sees)


def _over_sequences(attend, relation: Relation, *arrays: jax.Array):
    """`attend` on every sequence by itself. Padding gets numbers that nobody else has."""
    q, k = relation.q_tokens.segments, relation.k_tokens.segments
    if q is None or k is None:
        return jax.vmap(lambda *x: attend(*x, segments=None))(*arrays)
    batch = arrays[0].shape[0]
    q, k = (jnp.broadcast_to(jnp.where(x < 0, other, x), (batch, x.shape[-1])) for x, other in ((q, -1), (k, -2)))
    return jax.vmap(lambda q_segments, k_segments, *x: attend(*x, segments=(q_segments, k_segments)))(q, k, *arrays)


def _tile(length: int, most: int) -> int:
    """The largest multiple of 128 that divides a length and is not above `most`."""
    return next(tile for tile in range(most - most % LANES, 0, -LANES) if length % tile == 0)


def _by_head(x: jax.Array) -> jax.Array:
    """[B, K, G, ...] -> [B, H, ...]"""
    return x.reshape(x.shape[0], prod(x.shape[1:3]), *x.shape[3:])
