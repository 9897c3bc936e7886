"""Block attention in plain jax: tiled, O(L) memory, every backend. The specification of every other kernel.

Queries and keys are cut into tiles and one loop visits the pairs of tiles that can hold visible pairs of tokens.
Pairs excluded by the order of the slots are never in the loop; pairs excluded by positions or segments, which are
data, are in it behind a condition. The algorithm is that of FlashAttention-2 (arXiv:2307.08691).
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.attention.kernels.base import BlockKernel, Order, Relation
from ringjax.attention.mask import Tokens, may_meet, visible
from ringjax.attention.softmax import Partial, filled, finite_or_zero

State = tuple[jax.Array, ...]


@dataclass(frozen=True)
class XlaKernel(BlockKernel):
    """Tiled attention that XLA compiles for any backend.

    Attributes:
      q_rows: rows of a tile of scores: queries times the G heads that share a key/value head.
      k_tile: keys of a tile of scores. Large tiles feed the matrix units of a CPU best.
    """

    q_rows: int = 1024
    k_tile: int = 512
    name = "xla"

    def forward(self, q, k, v, relation, scale) -> Partial:
        tiles = self._tiles(q, k, relation)
        qs, ks, vs = tiles.cut_q(q), tiles.cut_k(k), tiles.cut_k(v)
        rows = qs.shape[:-1]

        def step(tile: State, i: jax.Array, j: jax.Array, seen: jax.Array | None) -> State:
            out, top, total = tile
            scores = _scores(qs[i], ks[j], seen, scale)
            new_top = jnp.maximum(top, scores.max(-1))
            shift = finite_or_zero(new_top)
            p = jnp.exp(scores - shift[..., None])
            old = jnp.exp(top - shift)
            out = out * old[..., None] + _dot("bkgqs,bksd->bkgqd", p.astype(v.dtype), vs[j])
            return out, new_top, total * old + p.sum(-1)

        state = (filled(q, (*rows, v.shape[-1])), filled(q, rows, -jnp.inf), filled(q, rows))
        out, top, total = tiles.loop(step, state, sides="qqq")
        out = out / jnp.where(total == 0, 1.0, total)[..., None]
        lse = finite_or_zero(top) + jnp.log(total)
        return Partial(tiles.join_q(out), tiles.join_q(lse))

    def backward(self, q, k, v, relation, scale, lse, delta, dout):
        tiles = self._tiles(q, k, relation)
        qs, ks, vs, douts = tiles.cut_q(q), tiles.cut_k(k), tiles.cut_k(v), tiles.cut_q(dout)
        # Rows that see nothing, and rows added to fill a tile, get lse +inf: their probabilities are 0.
        lses = tiles.cut_q(jnp.where(jnp.isneginf(lse), jnp.inf, lse), fill=jnp.inf)
        deltas = tiles.cut_q(delta)

        def step(tile: State, i: jax.Array, j: jax.Array, seen: jax.Array | None) -> State:
            dq, dk, dv = tile
            p = jnp.exp(_scores(qs[i], ks[j], seen, scale) - lses[i][..., None])
            dp = _dot("bkgqd,bksd->bkgqs", douts[i], vs[j])
            ds = (p * (dp - deltas[i][..., None]) * scale).astype(q.dtype)
            dq = dq + _dot("bkgqs,bksd->bkgqd", ds, ks[j])
            dk = dk + _dot("bkgqs,bkgqd->bksd", ds, qs[i])
            dv = dv + _dot("bkgqs,bkgqd->bksd", p.astype(dout.dtype), douts[i])
            return dq, dk, dv

        state = tuple(filled(q, x.shape) for x in (qs, ks, vs))
        dq, dk, dv = tiles.loop(step, state, sides="qkk")
        return tiles.join_q(dq), tiles.join_k(dk), tiles.join_k(dv)

    def _tiles(self, q: jax.Array, k: jax.Array, relation: Relation) -> "_Tiles":
        q_len, k_len = q.shape[3], k.shape[2]
        q_tile = _tile_size(q_len, max(1, self.q_rows // q.shape[2]))
        k_tile = _tile_size(k_len, self.k_tile)
        q_tokens, k_tokens = relation.q_tokens, relation.k_tokens
        if relation.order is Order.LOWER:
            q_tokens = q_tokens._replace(positions=jnp.arange(q_len)[None])
            k_tokens = k_tokens._replace(positions=jnp.arange(k_len)[None] + relation.shift)
        if (q_len % q_tile or k_len % k_tile) and q_tokens.segments is None:
            # Tokens added to fill a tile are padding, which segments express.
            q_tokens = q_tokens._replace(segments=jnp.zeros((1, q_len), jnp.int32))
            k_tokens = k_tokens._replace(segments=jnp.zeros((1, k_len), jnp.int32))
        relation = relation._replace(q_tokens=q_tokens, k_tokens=k_tokens)
        return _Tiles(relation, q_len, k_len, q_tile, k_tile)


@dataclass
class _Tiles:
    """Two blocks cut into tiles, and the pairs of tiles that attention has to visit."""

    relation: Relation
    q_len: int
    k_len: int
    q_tile: int
    k_tile: int

    def cut_q(self, x: jax.Array, fill: float = 0.0) -> jax.Array:
        """[B, K, G, Lq, ...] -> [tiles, B, K, G, q_tile, ...]"""
        return _cut(x, 3, self.q_tile, fill)

    def cut_k(self, x: jax.Array) -> jax.Array:
        """[B, K, Lk, ...] -> [tiles, B, K, k_tile, ...]"""
        return _cut(x, 2, self.k_tile, 0.0)

    def join_q(self, x: jax.Array) -> jax.Array:
        """The inverse of cut_q."""
        return _join(x, 3, self.q_len)

    def join_k(self, x: jax.Array) -> jax.Array:
        """The inverse of cut_k."""
        return _join(x, 2, self.k_len)

    def loop(self, step: Callable[..., State], state: State, sides: str) -> State:
        """Visit every needed pair of tiles: `step(tile of the state, i, j, what is seen)` -> new tile.

        `sides` says for each array of the state whether its tiles belong to queries or to keys. `step` works on
        tiles and not on the whole state, so that the condition around it moves no more than one tile.
        """
        clear, edge = self._pairs()
        q_tokens = _cut_tokens(self.relation.q_tokens, self.q_tile)
        k_tokens = _cut_tokens(self.relation.k_tokens, self.k_tile)
        for pairs, by_position in ((clear, False), (edge, True)):
            if len(pairs):
                q_side = q_tokens if by_position else q_tokens._replace(positions=None)
                k_side = k_tokens if by_position else k_tokens._replace(positions=None)
                state = self._visit(step, state, sides, pairs, q_side, k_side)
        return state

    def _visit(self, step, state: State, sides: str, pairs: np.ndarray, q_tokens, k_tokens) -> State:
        mask = self.relation.mask
        meet = may_meet(mask, q_tokens, k_tokens)
        needed = None if meet is None else meet[pairs[:, 0], pairs[:, 1]]

        def body(state: State, pair: tuple) -> tuple[State, None]:
            i, j, need = pair
            index = [i if side == "q" else j for side in sides]
            tile = tuple(x[at] for x, at in zip(state, index, strict=True))

            def attend(tile: State) -> State:
                seen = visible(mask, _tile_tokens(q_tokens, i), _tile_tokens(k_tokens, j))
                return step(tile, i, j, seen)

            tile = attend(tile) if need is None else jax.lax.cond(need, attend, lambda tile: tile, tile)
            return tuple(x.at[at].set(new) for x, at, new in zip(state, index, tile, strict=True)), None

        if len(pairs) == 1:
            return body(state, (pairs[0, 0], pairs[0, 1], None if needed is None else needed[0]))[0]
        return jax.lax.scan(body, state, (pairs[:, 0], pairs[:, 1], needed))[0]

    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Pairs (i, j) whose positions hide nothing, and pairs whose positions have to be compared."""
        counts = -(-self.q_len // self.q_tile), -(-self.k_len // self.k_tile)
        i, j = (x.ravel() for x in np.meshgrid(*(np.arange(n) for n in counts), indexing="ij"))
        none = np.zeros_like(i, bool)
        below = (j + 1) * self.k_tile <= i * self.q_tile
        touched = j * self.k_tile < (i + 1) * self.q_tile
        clear, edge = {
            Order.ALL: (~none, none),
            Order.ANY: (none, ~none),
            Order.LOWER: (below, touched & ~below),
        }[self.relation.order]
        pairs = np.stack([i, j], axis=1).astype(np.int32)
        return pairs[clear], pairs[edge]


def _dot(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    # TPUs and GPUs would otherwise round float32 operands to fewer bits.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(formula, a, b, precision=precision, preferred_element_type=jnp.float32)


def _scores(q: jax.Array, k: jax.Array, seen: jax.Array | None, scale: float) -> jax.Array:
    scores = _dot("bkgqd,bksd->bkgqs", q, k) * scale
    return scores if seen is None else jnp.where(seen[:, None, None], scores, -jnp.inf)


def _tile_size(length: int, most: int) -> int:
    """The largest divisor of length up to `most`; if that is small, `most`, and the last tile is filled up."""
    if length <= most:
        return length
    divisor = next(size for size in range(most, 0, -1) if length % size == 0)
    return divisor if 2 * divisor >= most else most


def _cut(x: jax.Array, dim: int, tile: int, fill: float) -> jax.Array:
    count = -(-x.shape[dim] // tile)
    pad = [(0, 0)] * x.ndim
    pad[dim] = (0, count * tile - x.shape[dim])
    x = jnp.pad(x, pad, constant_values=fill) if pad[dim][1] else x
    return jnp.moveaxis(x.reshape(*x.shape[:dim], count, tile, *x.shape[dim + 1 :]), dim, 0)


def _join(x: jax.Array, dim: int, length: int) -> jax.Array:
    x = jnp.moveaxis(x, 0, dim)
    x = x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=dim)


def _cut_tokens(tokens: Tokens, tile: int) -> Tokens:
    positions, segments = tokens
    return Tokens(
        None if positions is None else _cut(positions, 1, tile, 0),
        None if segments is None else _cut(segments, 1, tile, -1),
    )


def _tile_tokens(tokens: Tokens, at: jax.Array) -> Tokens:
    return Tokens(*(None if x is None else x[at] for x in tokens))
