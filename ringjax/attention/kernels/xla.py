"""Block attention in plain jax: tiled, O(L) memory, every backend. The specification of every other kernel.

Queries and keys are cut into tiles and one loop visits the pairs of tiles that can hold visible pairs of tokens.
Pairs excluded by the order of the slots are never in the loop; pairs excluded by positions or segments, which are
data, are in it behind a condition. The algorithm is that of FlashAttention-2 (arXiv:2307.08691). Letters as in
`tiles`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ringjax.attention.kernels.base import BlockKernel
from ringjax.attention.kernels.tiles import State, Tiles, by_rows
from ringjax.attention.softmax import Partial, filled, finite_or_zero


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

    def forward(self, q, k, v, relation, scale) -> Partial:
        def attend(tiles: Tiles, q: jax.Array, k: jax.Array, v: jax.Array) -> State:
            qs, ks, vs = tiles.cut_q(q), tiles.cut_k(k), tiles.cut_k(v)
            rows = qs.shape[:-1]

            def step(tile: State, i: jax.Array, j: jax.Array, seen: jax.Array | None) -> State:
                out, top, total = tile
                scores = tiles.hide(_dot("nxd,nsd->nxs", qs[i], ks[j]) * scale, seen)
                new_top = jnp.maximum(top, scores.max(-1))
                shift = finite_or_zero(new_top)
                p = _made_once(jnp.exp(scores - shift[..., None]))
                old = jnp.exp(top - shift)
                out = out * old[..., None] + _dot("nxs,nsd->nxd", p.astype(v.dtype), vs[j])
                return out, new_top, total * old + p.sum(-1)

            state = (filled(q, (*rows, v.shape[-1])), filled(q, rows, -jnp.inf), filled(q, rows))
            out, top, total = tiles.loop(step, state, sides="qqq")
            out = out / jnp.where(total == 0, 1.0, total)[..., None]
            return tiles.join_q(out), tiles.join_q(finite_or_zero(top) + jnp.log(total))

        return Partial(*by_rows(attend, relation, (q, k, v), self.q_tile, self.k_tile))

    def backward(self, q, k, v, relation, scale, lse, delta, dout):
        # Rows that see nothing, and rows added to fill a tile, get lse +inf: their probabilities are 0.
        lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse)

        def attend(tiles: Tiles, q, k, v, lse, delta, dout) -> State:
            qs, ks, vs, douts = tiles.cut_q(q), tiles.cut_k(k), tiles.cut_k(v), tiles.cut_q(dout)
            lses, deltas = tiles.cut_q(lse, fill=jnp.inf), tiles.cut_q(delta)

            def step(tile: State, i: jax.Array, j: jax.Array, seen: jax.Array | None) -> State:
                # Scores have keys first: of the five products only dq's then contracts over leading dims, the slow
                # kind on a CPU; with queries first, two would.
                dq, dk, dv = tile
                scores = tiles.hide_transposed(_dot("nsd,nxd->nsx", ks[j], qs[i]) * scale, seen)
                p = _made_once(jnp.exp(scores - lses[i][:, None]))
                dp = _dot("nsd,nxd->nsx", vs[j], douts[i])
                ds = _made_once((p * (dp - deltas[i][:, None]) * scale).astype(q.dtype))
                dq = dq + _dot("nsx,nsd->nxd", ds, ks[j])
                dk = dk + _dot("nsx,nxd->nsd", ds, qs[i])
                dv = dv + _dot("nsx,nxd->nsd", p.astype(dout.dtype), douts[i])
                return dq, dk, dv

            state = tuple(filled(q, x.shape) for x in (qs, ks, vs))
            dq, dk, dv = tiles.loop(step, state, sides="qkk")
            return tiles.join_q(dq), tiles.join_k(dk), tiles.join_k(dv)

        return by_rows(attend, relation, (q, k, v, lse, delta, dout), self.q_tile, self.k_tile)


def _dot(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    # TPUs and GPUs would otherwise round float32 operands to fewer bits.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(formula, a, b, precision=precision, preferred_element_type=jnp.float32)


def _made_once(x: jax.Array) -> jax.Array:
    """x, kept from being computed again inside each of its uses: exp in a row sum costs more than the products."""
    return jax.lax.optimization_barrier(x)
