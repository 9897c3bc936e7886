"""Block attention for NVIDIA GPUs by cuDNN, as jax ships it."""

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp

from ringjax.attention.kernels import jax_private
from ringjax.attention.kernels.base import BlockKernel, Gradients, Order, Relation
from ringjax.attention.kernels.gpu import GpuKernel
from ringjax.attention.kernels.guard import checked_by_jax, guarded, insist
from ringjax.attention.scores import ScoreRule
from ringjax.attention.softmax import Partial, merge


@dataclass(frozen=True)
class CudnnKernel(BlockKernel):
    """cuDNN's fused attention, for calls without a mask and for plain causal ones.

    Its results come in the dtype of its inputs. Where a call gives the whole result, as in a ring of one, that is
    what the operator rounds to anyway. In a longer ring each hop's part is rounded before it is added, and the
    gradients err more: see `registry`. No memory of the caller's is written to, and the merge is a pass of its own.

    Attributes:
      exact: the kernel that does a call again in which something is not finite.
    """

    exact: BlockKernel = GpuKernel()  # noqa: RUF009 (frozen)
    name = "cudnn"

    @property
    def check_vma(self) -> bool:
        return False

    def refusal(self, q, kv, relation, rule) -> str | None:
        dim, value_dim, (q_len, k_len) = q.shape[-1], kv.shape[-1] - q.shape[-1], (q.shape[3], kv.shape[2])
        if q.dtype not in (jnp.bfloat16, jnp.float16):
            return f"it computes in bfloat16 and float16, got {q.dtype}"
        if dim != value_dim or dim % 8 or dim > 128:
            return f"D and Dv must be equal, a multiple of 8 and at most 128; got {dim} and {value_dim}"
        if q_len % 64 or k_len % 64:
            return f"numbers of queries and keys must be multiples of 64; got {q_len} and {k_len}"
        return _unmet(relation, rule, q_len, k_len) or checked_by_jax(q, kv) or jax_private.cudnn_problem()

    def forward(self, q, kv, relation, rule, heads, before, q_slots, k_slots) -> Partial:
        some_q, some_kv = q_slots.take(q, 3), k_slots.take(kv, 2)
        insist(self, some_q, some_kv, relation, rule)

        def again() -> Partial:
            return self.exact.forward(q, kv, relation, rule, heads, before, q_slots, k_slots)

        rows, q_BHLD = some_q.shape[:4], _by_head(some_q)
        merged = Partial(*(q_slots.take(x, 3) for x in before))
        for start, stop, causal in _parts(relation, rows[3], some_kv.shape[2]):
            k, v = jnp.split(some_kv[:, :, start:stop], [q.shape[-1]], axis=-1)
            out, lse = jax_private.cudnn_forward(q_BHLD, k, v, rule.scale, causal)
            merged = merge(merged, Partial(out.astype(jnp.float32).reshape(*rows, -1), lse.reshape(rows)))
        result = Partial(*(q_slots.put(x, new, 3) for x, new in zip(before, merged, strict=True)))
        return guarded(result, (some_q, some_kv), again)

    def backward(self, q, kv, relation, rule, heads, lse, delta, dout, before, q_slots, k_slots) -> Gradients:
        of_rows = [q_slots.take(x, 3) for x in (lse, delta, dout)]
        some_q, some_kv = q_slots.take(q, 3), k_slots.take(kv, 2)
        insist(self, some_q, some_kv, relation, rule)

        def again() -> Gradients:
            rows = (lse, delta, dout)
            return self.exact.backward(q, kv, relation, rule, heads, *rows, before, q_slots, k_slots)

        out = stand_in(*of_rows[1:])
        lse_BHL, out_BHLD, dout_BHLD = (_by_head(x) for x in (of_rows[0], out, of_rows[2]))
        dq, dkv, q_BHLD = q_slots.take(before.dq, 3), k_slots.take(before.dkv, 2), _by_head(some_q)
        for start, stop, causal in _parts(relation, some_q.shape[3], some_kv.shape[2]):
            k, v = jnp.split(some_kv[:, :, start:stop], [q.shape[-1]], axis=-1)
            of_k = k, v, lse_BHL, out_BHLD, dout_BHLD
            more_dq, *more_dkv = jax_private.cudnn_backward(q_BHLD, *of_k, rule.scale, causal)
            dq = dq + more_dq.reshape(dq.shape).astype(jnp.float32)
            dkv = dkv.at[:, :, start:stop].add(jnp.concatenate(more_dkv, axis=-1).astype(jnp.float32))
        result = Gradients(q_slots.put(before.dq, dq, 3), k_slots.put(before.dkv, dkv, 2))
        return guarded(result, (some_q, some_kv, *of_rows, out), again)


def stand_in(delta: jax.Array, dout: jax.Array) -> jax.Array:
    """Something like an out: of the shape and dtype of dout, and such that rowsum(dout * it) = delta.

    cuDNN takes the out and works out delta from it, without the part that comes from the cotangent of the lse. This
    is the shortest row that gives delta, delta dout / |dout|^2, but for the place where dout is largest: there stands
    what rounding the others has left, so that delta keeps some 17 bits.

    Where a row of dout is 0 and its delta is not, there is no such row: this one is infinite, by which `guarded`
    sees it.
    """
    dout_f32 = dout.astype(jnp.float32)
    at = jnp.argmax(jnp.abs(dout_f32), axis=-1, keepdims=True)
    largest = jnp.arange(dout.shape[-1]) == at
    top = jnp.take_along_axis(dout_f32, at, axis=-1)
    rest = jnp.where(largest, 0.0, dout_f32 / jnp.where(top == 0, 1.0, top))
    square = (rest * rest).sum(-1, keepdims=True)
    few = square < 2.0**-20
    delta = delta[..., None]
    others = jnp.where(few, 0.0, rest * (delta / jnp.where(top == 0, 1.0, top) / jnp.where(few, 1.0, square)))
    others = others.astype(dout.dtype)
    left = delta - (others.astype(jnp.float32) * dout_f32).sum(-1, keepdims=True)
    last = jnp.where((top == 0) & (delta == 0), 0.0, left / top)
    # Without any dout, `last` is infinite: no number that `guarded` lets pass.
    return jnp.where(largest, last.astype(dout.dtype), others)


def _unmet(relation: Relation, rule: ScoreRule, q_len: int, k_len: int) -> str | None:
    """What a call asks for that cuDNN does not do, or not exactly."""
    mask, lead = relation.mask, relation.lead
    if rule.softcap is not None or rule.alibi or rule.dropout:
        return "it knows no softcap, no ALiBi and no dropout that is the same on every mesh"
    if relation.q_tokens.segments is not None:
        return "it knows no documents and no padding (segment_ids)"
    if relation.order is Order.ALL:
        return None
    if relation.order is Order.ANY:
        return "it knows no positions that are data, and no prefix"
    if not mask.causal or mask.window is not None:
        return "it is used for causal and for full masks only, not for windows"
    ahead, between = divmod(lead.low, lead.stride)
    if lead.low != lead.high or between or ahead < 0 or ahead % 64 or ahead + q_len > k_len:
        return "the queries of a causal mask must be ahead of the keys by a multiple of 64 slots, known beforehand"
    return None


def _parts(relation: Relation, q_len: int, k_len: int) -> list[tuple[int, int, bool]]:
    """Runs of keys, [start, stop), that all queries see, or that are the queries' own slots and causal."""
    if relation.order is Order.ALL:
        return [(0, k_len, False)]
    ahead = relation.lead.low // relation.lead.stride
    earlier = [(0, ahead, False)] if ahead else []
    return [*earlier, (ahead, ahead + q_len, True)]


def _by_head(x: jax.Array) -> jax.Array:
    """[B, K, G, ...] -> [B, H, ...]"""
    return x.reshape(x.shape[0], prod(x.shape[1:3]), *x.shape[3:])
