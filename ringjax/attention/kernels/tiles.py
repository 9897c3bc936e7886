"""Cutting blocks into tiles, and the loop over the pairs of tiles that attention has to visit.

Letters: n rows, each one key/value head of one sequence; x the queries of a tile, over the G heads that share that
key/value head; s the keys of a tile.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.attention.kernels.base import Order, Relation
from ringjax.attention.mask import Tokens, may_meet, visible

State = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Tiles:
    """Rows of two blocks cut into tiles.

    Attributes:
      relation: what sees what, with tokens of [n, L].
      group: G.
      q_len: queries of the block.
      k_len: keys of the block.
      q_tile: queries of a tile, for each of the G heads.
      k_tile: keys of a tile.
    """

    relation: Relation
    group: int
    q_len: int
    k_len: int
    q_tile: int
    k_tile: int

    def cut_q(self, x: jax.Array, fill: float = 0.0) -> jax.Array:
        """[n, G, Lq, ...] -> [tiles, n, x, ...]"""
        tiles = _cut(x, 2, self.q_tile, fill)
        return tiles.reshape(*tiles.shape[:2], -1, *tiles.shape[4:])

    def cut_k(self, x: jax.Array) -> jax.Array:
        """[n, Lk, ...] -> [tiles, n, s, ...]"""
        return _cut(x, 1, self.k_tile, 0.0)

    def join_q(self, tiles: jax.Array) -> jax.Array:
        """The inverse of cut_q."""
        tiles = tiles.reshape(*tiles.shape[:2], self.group, self.q_tile, *tiles.shape[3:])
        return _join(tiles, 2, self.q_len)

    def join_k(self, tiles: jax.Array) -> jax.Array:
        """The inverse of cut_k."""
        return _join(tiles, 1, self.k_len)

    def hide(self, scores_nxs: jax.Array, seen: jax.Array | None) -> jax.Array:
        """Scores with -inf where nothing is seen."""
        if seen is None:
            return scores_nxs
        grouped = scores_nxs.reshape(-1, self.group, self.q_tile, self.k_tile)
        return jnp.where(seen[:, None], grouped, -jnp.inf).reshape(scores_nxs.shape)

    def hide_transposed(self, scores_nsx: jax.Array, seen: jax.Array | None) -> jax.Array:
        """As `hide`, for scores with the keys first."""
        if seen is None:
            return scores_nsx
        grouped = scores_nsx.reshape(-1, self.k_tile, self.group, self.q_tile)
        return jnp.where(seen.swapaxes(1, 2)[:, :, None], grouped, -jnp.inf).reshape(scores_nsx.shape)

    def loop(self, step: Callable[..., State], state: State, sides: str) -> State:
        """Visit every needed pair of tiles: `step(tile of the state, i, j, what is seen)` -> new tile.

        `sides` says for each array of the state whether its tiles belong to queries ("q") or to keys ("k"). `step`
        works on tiles and not on the whole state, so that the condition around it moves no more than one tile.
        """
        clear, edge = self._pairs()
        q_tokens, k_tokens = self._tokens()
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
                return step(tile, i, j, visible(mask, _tile(q_tokens, i), _tile(k_tokens, j)))

            tile = attend(tile) if need is None else jax.lax.cond(need, attend, lambda tile: tile, tile)
            return tuple(x.at[at].set(new) for x, at, new in zip(state, index, tile, strict=True)), None

        if len(pairs) == 1:
            return body(state, (pairs[0, 0], pairs[0, 1], None if needed is None else needed[0]))[0]
        return jax.lax.scan(body, state, (pairs[:, 0], pairs[:, 1], needed))[0]

    def _tokens(self) -> tuple[Tokens, Tokens]:
        """Tokens of the queries and of the keys, [tiles, n or 1, tokens of a tile]."""
        q, k = self.relation.q_tokens, self.relation.k_tokens
        if self.relation.order is Order.LOWER:
            q = q._replace(positions=jnp.arange(self.q_len)[None])
            k = k._replace(positions=jnp.arange(self.k_len)[None] + self.relation.shift)
        if (self.q_len % self.q_tile or self.k_len % self.k_tile) and q.segments is None:
            # Tokens added to fill a tile are padding, which segments express.
            q = q._replace(segments=jnp.zeros((1, self.q_len), jnp.int32))
            k = k._replace(segments=jnp.zeros((1, self.k_len), jnp.int32))
        return _cut_tokens(q, self.q_tile), _cut_tokens(k, self.k_tile)

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


def by_rows(
    attend: Callable[..., State], relation: Relation, arrays: tuple[jax.Array, ...], q_tile: int, k_tile: int
) -> State:
    """Run `attend(tiles, *arrays)` on as many rows at a time as have q_tile * k_tile scores in a pair of tiles.

    Small blocks then need few operations, and the scores of large ones stay in a core's cache.

    Args:
      attend: works on arrays of [n, ...] and returns such.
      relation: what sees what, with tokens of [B or 1, L].
      arrays: [B, K, ...] each; the first is q, the second k.
      q_tile: most queries in a tile, counted over the G heads.
      k_tile: most keys in a tile.

    Returns:
      What `attend` returns, as [B, K, ...].
    """
    batch, kv_heads, group, q_len, _ = arrays[0].shape
    k_len, count = arrays[1].shape[2], batch * kv_heads
    area = q_tile * k_tile
    q_tile, k_tile = _tile_size(q_len, max(1, q_tile // group)), _tile_size(k_len, k_tile)
    rows = _tile_divisor(count, max(1, area // (group * q_tile * k_tile)))

    def cut(x: jax.Array) -> jax.Array:
        return x.reshape(count // rows, rows, *x.shape[2:])

    def cut_tokens(tokens: Tokens) -> Tokens:
        return Tokens(
            *(
                None if x is None else cut(jnp.broadcast_to(x[:, None], (batch, kv_heads, x.shape[1])))
                for x in tokens
            )
        )

    def run(some: tuple) -> State:
        q_tokens, k_tokens, arrays = some
        here = relation._replace(q_tokens=q_tokens, k_tokens=k_tokens)
        return attend(Tiles(here, group, q_len, k_len, q_tile, k_tile), *arrays)

    cuts = (cut_tokens(relation.q_tokens), cut_tokens(relation.k_tokens), tuple(map(cut, arrays)))
    if rows == count:
        results = tuple(x[None] for x in run(jax.tree.map(lambda x: x[0], cuts)))
    else:
        results = jax.lax.map(run, cuts)
    return tuple(x.reshape(batch, kv_heads, *x.shape[2:]) for x in results)


def _tile_size(length: int, most: int) -> int:
    """The largest divisor of length up to `most`; if that is small, `most`, and the last tile is filled up."""
    divisor = _tile_divisor(length, most)
    return divisor if divisor == length or 2 * divisor >= most else most


def _tile_divisor(length: int, most: int) -> int:
    return next(size for size in range(min(length, most), 0, -1) if length % size == 0)


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


def _tile(tokens: Tokens, at: jax.Array) -> Tokens:
    return Tokens(*(None if x is None else x[at] for x in tokens))
