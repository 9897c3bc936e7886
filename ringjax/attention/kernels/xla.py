"""Block attention in plain jax: tiled, O(L) memory, every backend. The specification of every other kernel.

Queries and keys are cut into tiles and one loop visits the pairs of tiles that can hold visible pairs of tokens.
Pairs excluded by the order of the slots are never in the loop; pairs excluded by positions or segments, which are
data, are in it behind a condition. The algorithm is that of FlashAttention-2 (arXiv:2307.08691). Letters as in
`tiles`.

A weight of 0 does not silence a value that is not finite, since 0 * NaN is NaN. Where some of the pairs of a tile are
hidden, such queries and keys enter the products as zeros, and all weights of theirs that are seen become NaN instead:
what is broken stays with those who may see it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ringjax.attention.kernels.base import BlockKernel, Gradients
from ringjax.attention.kernels.tiles import Pair, State, Tiles, by_rows
from ringjax.attention.scores import ScoreRule
from ringjax.attention.softmax import Partial, filled, finite_or_zero, merge


@dataclass(frozen=True)
class XlaKernel(BlockKernel):
    """Tiled attention that XLA compiles for any backend.

    The default tiles hold 2^18 scores, 1 MB in float32: measured fastest on CPUs with 2 MB of cache in a core.

    Attributes:
      q_tile: most queries in a tile, counted over the G heads that share a key/value head.
      k_tile: most keys in a tile.
    """

    q_tile: int = 512
    k_tile: int = 512
    name = "xla"

    def forward(self, q, kv, relation, rule, heads, before, q_slots, k_slots) -> Partial:
        unit = _unit(rule)
        k, v = jnp.split(k_slots.take(kv, 2), [q.shape[-1]], axis=-1)

        def attend(tiles: Tiles, q: jax.Array, k: jax.Array, v: jax.Array) -> State:
            qs, ks, vs = tiles.cut_q(q), tiles.cut_k(k), tiles.cut_k(v)
            rows = qs.shape[:-1]

            def step(tile: State, pair: Pair) -> State:
                out, top, total = tile
                (q,), (k, v), broken = _tame(tiles, pair, (qs[pair.i],), (ks[pair.j], vs[pair.j]))
                scores, _ = _scores(tiles, pair, _dot("nxd,nsd->nxs", q, k))
                if (seen := tiles.seen(pair)) is not None:
                    scores = jnp.where(seen, scores, -jnp.inf)
                new_top = jnp.maximum(top, scores.max(-1))
                shift = finite_or_zero(new_top)
                # First the difference, which is never above 0, then the unit: no rounding makes a weight exceed 1.
                p = _made_once(_seen(jnp.exp(unit * (scores - shift[..., None])), seen, broken))
                old = jnp.exp(unit * (top - shift))
                kept = tiles.keep(pair)
                weights = p if kept is None else p * kept
                out = out * old[..., None] + _dot("nxs,nsd->nxd", weights.astype(v.dtype), v)
                return out, new_top, total * old + p.sum(-1)

            state = (filled(q, (*rows, v.shape[-1])), filled(q, rows, -jnp.inf), filled(q, rows))
            out, top, total = tiles.loop(step, state, sides="qqq")
            out = out / jnp.where(total == 0, 1.0, total)[..., None]
            return tiles.join_q(out), tiles.join_q(unit * finite_or_zero(top) + jnp.log(total))

        arrays = (q_slots.take(q, 3), k, v)
        part = Partial(*by_rows(attend, relation, rule, heads, arrays, self.q_tile, self.k_tile))
        merged = merge(Partial(*(q_slots.take(x, 3) for x in before)), part)
        return Partial(*(q_slots.put(x, new, 3) for x, new in zip(before, merged, strict=True)))

    def backward(self, q, kv, relation, rule, heads, lse, delta, dout, before, q_slots, k_slots) -> Gradients:
        # Rows that see nothing, and rows added to fill a tile, get lse +inf: their probabilities are 0.
        lse, unit = jnp.where(jnp.isneginf(lse), jnp.inf, lse), _unit(rule)
        k, v = jnp.split(k_slots.take(kv, 2), [q.shape[-1]], axis=-1)

        def attend(tiles: Tiles, q, k, v, lse, delta, dout) -> State:
            qs, ks, vs, douts = tiles.cut_q(q), tiles.cut_k(k), tiles.cut_k(v), tiles.cut_q(dout)
            lses, deltas = tiles.cut_q(lse, fill=jnp.inf), tiles.cut_q(delta)

            def step(tile: State, pair: Pair) -> State:
                # Scores have keys first: of the five products only dq's then contracts over leading dims, the slow
                # kind on a CPU; with queries first, two would.
                dq, dk, dv = tile
                of_queries = (qs[pair.i], douts[pair.i], deltas[pair.i])
                (q, dout, delta), (k, v), broken = _tame(tiles, pair, of_queries, (ks[pair.j], vs[pair.j]))
                scores, slope = _scores(tiles, pair, _dot("nsd,nxd->nsx", k, q))
                seen = tiles.seen(pair)
                # No score is above the lse it is part of, but for rounding, which matters if scores are large.
                p = jnp.exp(jnp.minimum(unit * scores - tiles.along_q(lses[pair.i]), 0.0))
                p = _made_once(_seen(p, seen, broken))
                dp = _dot("nsd,nxd->nsx", v, dout)
                kept = tiles.keep(pair)
                weights, dp = (p, dp) if kept is None else (p * kept, dp * kept)
                ds = p * (dp - tiles.along_q(delta)) * tiles.rule.scale
                ds = ds if slope is None else ds * slope
                # Products of large finite numbers overflow, and 0 times that would be NaN where nothing is seen.
                ds = ds if seen is None else jnp.where(seen, ds, 0.0)
                ds = _made_once(ds.astype(q.dtype))
                dq = dq + _dot("nsx,nsd->nxd", ds, k)
                dk = dk + _dot("nsx,nxd->nsd", ds, q)
                dv = dv + _dot("nsx,nxd->nsd", weights.astype(dout.dtype), dout)
                return dq, dk, dv

            state = tuple(filled(q, x.shape) for x in (qs, ks, vs))
            dq, dk, dv = tiles.loop(step, state, sides="qkk")
            return tiles.join_q(dq), tiles.join_k(dk), tiles.join_k(dv)

        q, lse, delta, dout = (q_slots.take(x, 3) for x in (q, lse, delta, dout))
        arrays = (q, k, v, lse, delta, dout)
        dq, *dkv = by_rows(attend, relation, rule, heads, arrays, self.q_tile, self.k_tile, keys_first=True)
        dq = q_slots.put(before.dq, q_slots.take(before.dq, 3) + dq, 3)
        share = jnp.concatenate(dkv, axis=-1)
        return Gradients(dq, k_slots.put(before.dkv, k_slots.take(before.dkv, 2) + share, 2))


def _unit(rule: ScoreRule) -> float:
    """What scores are counted in.

    Where nothing but the scale acts on the products, they are scores in its unit: multiplying is left to the
    exponential, and the row maxima, which a CPU takes in a loop of their own, need no other array of that size.
    """
    return rule.scale if rule.scale > 0 and rule.softcap is None and not rule.alibi else 1.0


def _scores(tiles: Tiles, pair: Pair, products: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Scores in `_unit` from the products of queries and keys, and the slope of the softcap there, None = 1."""
    if _unit(tiles.rule) != 1.0:
        return products, None
    scores, slope = tiles.rule.cap(products * tiles.rule.scale)
    bias = tiles.bias(pair)
    return scores if bias is None else scores + bias, slope


def _seen(p: jax.Array, seen: jax.Array | None, broken: jax.Array | None) -> jax.Array:
    """Weights with 0 where nothing is seen, and NaN where what is seen is broken.

    NaN joins here and not before the exponential, which XLA does not always let it pass.
    """
    p = p if broken is None else p + broken
    return p if seen is None else jnp.where(seen, p, 0.0)


def _tame(tiles: Tiles, pair: Pair, of_queries: State, of_keys: State) -> tuple[State, State, jax.Array | None]:
    """Both sides with what is not finite replaced by 0, and what to add to the weights: NaN there, else 0.

    A query or key is replaced in all of its arrays if one of them has a value that is not finite.
    """
    if pair.is_clear:
        return of_queries, of_keys, None

    def tame(arrays: State) -> tuple[State, jax.Array]:
        finite = [jnp.isfinite(x) if x.ndim == 2 else jnp.isfinite(x).all(-1) for x in arrays]
        fine = finite[0]
        for other in finite[1:]:
            fine &= other
        safe = tuple(jnp.where(fine if x.ndim == 2 else fine[..., None], x, jnp.zeros((), x.dtype)) for x in arrays)
        return safe, jnp.where(fine, 0.0, jnp.nan)

    (queries, bad_queries), (keys, bad_keys) = tame(of_queries), tame(of_keys)
    return queries, keys, tiles.along_q(bad_queries) + tiles.along_k(bad_keys)


def _dot(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    # TPUs and GPUs would otherwise round float32 operands to fewer bits.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(formula, a, b, precision=precision, preferred_element_type=jnp.float32)


def _made_once(x: jax.Array) -> jax.Array:
    """x, kept from being computed again inside each of its uses: exp in a row sum costs more than the products."""
    return jax.lax.optimization_barrier(x)
