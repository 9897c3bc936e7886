"""Cutting blocks into tiles, and the loop over the pairs of tiles that attention has to visit.

Letters: n rows, each one key/value head of one sequence; x the queries of a tile, over the G heads that share that
key/value head; s the keys of a tile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.attention.kernels.base import Order, Relation
from ringjax.attention.loop import loop
from ringjax.attention.mask import Tokens, may_meet, visible
from ringjax.attention.scores import Heads, ScoreRule, alibi_bias, keep
from ringjax.attention.softmax import filled

State = tuple[jax.Array, ...]


class Pair(NamedTuple):
    """One pair of tiles.

    Attributes:
      i: tile of queries.
      j: tile of keys.
      q: what decides which of the keys the queries see: tokens of [n, q]. All None if they see all of them.
      k: likewise, [n, s].
    """

    i: jax.Array
    j: jax.Array
    q: Tokens
    k: Tokens

    @property
    def is_clear(self) -> bool:
        """Whether every query sees every key."""
        return all(x is None for x in self.q)


@dataclass(frozen=True)
class Tiles:
    """Rows of two blocks cut into tiles.

    Attributes:
      relation: what sees what, with tokens of [n, L].
      rule: what happens to scores.
      heads: of [n, G].
      group: G.
      q_len: queries of the block.
      k_len: keys of the block.
      q_tile: queries of a tile, for each of the G heads.
      k_tile: keys of a tile.
      keys_first: whether scores are [n, s, x] and not [n, x, s].
    """

    relation: Relation
    rule: ScoreRule
    heads: Heads
    group: int
    q_len: int
    k_len: int
    q_tile: int
    k_tile: int
    keys_first: bool

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

    def along_q(self, x_nx: jax.Array) -> jax.Array:
        """One value per query, to broadcast against scores."""
        return x_nx[:, None] if self.keys_first else x_nx[:, :, None]

    def along_k(self, x_ns: jax.Array) -> jax.Array:
        """One value per key, to broadcast against scores."""
        return x_ns[:, :, None] if self.keys_first else x_ns[:, None]

    def seen(self, pair: Pair) -> jax.Array | None:
        """Which scores of a pair count, of the shape of the scores; None = all."""
        seen = visible(self.relation.mask, self._spread_q(pair.q), self._spread_k(pair.k))
        return None if seen is None else self._as_scores(seen)

    def bias(self, pair: Pair) -> jax.Array | None:
        """What is added to the scores of a pair."""
        if not self.rule.alibi:
            return None
        return self._as_scores(alibi_bias(self._spread_heads(self.heads.slopes), *self._positions(pair)))

    def keep(self, pair: Pair) -> jax.Array | None:
        """What the weights of a pair are multiplied by."""
        rate = self.rule.dropout
        if not rate:
            return None
        kept = keep(self._spread_heads(self.heads.noise), *self._positions(pair), rate)
        return self._as_scores(jnp.where(kept, jnp.float32(1 / (1 - rate)), 0.0))

    def loop(self, step: Callable[..., State], state: State, sides: str) -> State:
        """Visit every needed pair of tiles: `step(tile of the state, pair)` -> new tile.

        `sides` says for each array of the state whether its tiles belong to queries ("q") or to keys ("k"). `step`
        works on tiles and not on the whole state, so that the condition around it moves no more than one tile.
        """
        clear, edge = candidates(self.relation, (self.q_len, self.k_len), (self.q_tile, self.k_tile))
        q, k = self._sight()
        if len(clear):
            state = self._visit(step, state, sides, clear, q._replace(positions=None), k._replace(positions=None))
        if len(edge):
            state = self._visit(step, state, sides, edge, q, k)
        return state

    def _visit(self, step, state: State, sides: str, pairs: np.ndarray, q: Tokens, k: Tokens) -> State:
        needed = self._needed(pairs, q, k)

        def body(state: State, at: tuple) -> State:
            i, j, need = at
            index = [i if side == "q" else j for side in sides]
            tile = tuple(x[at] for x, at in zip(state, index, strict=True))
            pair = Pair(i, j, _tile(q, i), _tile(k, j))

            def attend(tile: State) -> State:
                return step(tile, pair)

            tile = attend(tile) if need is None else jax.lax.cond(need, attend, lambda tile: tile, tile)
            return tuple(x.at[at].set(new) for x, at, new in zip(state, index, tile, strict=True))

        return loop(body, state, (pairs[:, 0], pairs[:, 1], needed))

    def _needed(self, pairs: np.ndarray, q: Tokens, k: Tokens) -> jax.Array | None:
        """Which pairs have to be visited; None = all."""
        lead = self.relation.lead
        if self.relation.order is Order.SLOTS and lead.low == lead.high:
            # Positions are known beforehand, and `candidates` has left out what they hide.
            q, k = q._replace(positions=None), k._replace(positions=None)
        meet = may_meet(self.relation.mask, q, k)
        return None if meet is None else meet[pairs[:, 0], pairs[:, 1]]

    def _sight(self) -> tuple[Tokens, Tokens]:
        """What decides what is seen: tokens of queries and of keys, [tiles, n or 1, tokens of a tile]."""
        q, k = self.relation.q_tokens, self.relation.k_tokens
        if self.relation.order is Order.SLOTS:
            lead = self.relation.lead
            q = q._replace(positions=_run(self.q_len, lead.stride, q.segments) + lead.by)
            k = k._replace(positions=_run(self.k_len, lead.stride, k.segments))
        if (self.q_len % self.q_tile or self.k_len % self.k_tile) and q.segments is None:
            # Tokens added to fill a tile are padding, which segments express.
            q = q._replace(segments=jnp.zeros((1, self.q_len), jnp.int32))
            k = k._replace(segments=jnp.zeros((1, self.k_len), jnp.int32))
        return _cut_tokens(q, self.q_tile), _cut_tokens(k, self.k_tile)

    def _positions(self, pair: Pair) -> tuple[jax.Array, jax.Array]:
        """True positions of a pair's queries and keys, spread."""
        q, k = self.relation.q_tokens.positions, self.relation.k_tokens.positions
        assert q is not None, "scores depend on positions that are not given"
        assert k is not None, "scores depend on positions that are not given"
        q, k = _cut(q, 1, self.q_tile, 0)[pair.i], _cut(k, 1, self.k_tile, 0)[pair.j]
        spread_q, spread_k = self._spread_q(Tokens(q)).positions, self._spread_k(Tokens(k)).positions
        return spread_q, spread_k  # type: ignore[return-value]

    def _spread_q(self, q: Tokens) -> Tokens:
        """[n, q] so that it broadcasts against [n, G, q, s], or against [n, s, G, q]."""
        return jax.tree.map(lambda x: x[:, None, None, :] if self.keys_first else x[:, None, :, None], q)

    def _spread_k(self, k: Tokens) -> Tokens:
        """[n, s], likewise."""
        return jax.tree.map(lambda x: x[:, :, None, None] if self.keys_first else x[:, None, None, :], k)

    def _spread_heads(self, x: jax.Array | None) -> jax.Array:
        """[n, G], likewise."""
        assert x is not None, "what differs between heads is not given"
        return x[:, None, :, None] if self.keys_first else x[:, :, None, None]

    def _as_scores(self, x: jax.Array) -> jax.Array:
        """From broadcasting over heads to the shape of scores."""
        if self.keys_first:
            x = jnp.broadcast_to(x, (x.shape[0], self.k_tile, self.group, self.q_tile))
            return x.reshape(x.shape[0], self.k_tile, -1)
        x = jnp.broadcast_to(x, (x.shape[0], self.group, self.q_tile, self.k_tile))
        return x.reshape(x.shape[0], -1, self.k_tile)


def candidates(relation: Relation, lengths: tuple[int, int], tiles: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of tiles (i, j) whose positions hide nothing, and pairs whose positions have to be compared.

    Args:
      relation: what sees what; its data is not looked at.
      lengths: of the blocks of queries and of keys.
      tiles: queries and keys of a tile.
    """
    (q_len, k_len), (q_tile, k_tile) = lengths, tiles
    counts = -(-q_len // q_tile), -(-k_len // k_tile)
    i, j = (x.ravel() for x in np.meshgrid(*(np.arange(n) for n in counts), indexing="ij"))
    none = np.zeros_like(i, bool)
    clear, edge = none, none
    match relation.order:
        case Order.ALL:
            clear = ~none
        case Order.ANY:
            edge = ~none
        case Order.SLOTS:
            lead, (low, high) = relation.lead, relation.mask.differences
            first = (i * q_tile, j * k_tile)
            last = (np.minimum(first[0] + q_tile, q_len) - 1, np.minimum(first[1] + k_tile, k_len) - 1)
            least = lead.stride * (first[0] - last[1]) + lead.low
            most = lead.stride * (last[0] - first[1]) + lead.high
            clear = (least >= low) & (most <= high)
            edge = (most >= low) & (least <= high) & ~clear
    pairs = np.stack([i, j], axis=1).astype(np.int32)
    return pairs[clear], pairs[edge]


def by_rows(
    attend: Callable[..., State],
    relation: Relation,
    rule: ScoreRule,
    heads: Heads,
    arrays: tuple[jax.Array, ...],
    q_tile: int,
    k_tile: int,
    keys_first: bool = False,
) -> State:
    """Run `attend(tiles, *arrays)` on as many rows at a time as have q_tile * k_tile scores in a pair of tiles.

    Small blocks then need few operations, and the scores of large ones stay in a core's cache.

    Args:
      attend: works on arrays of [n, ...] and returns such.
      relation: what sees what, with tokens of [B or 1, L].
      rule: what happens to scores.
      heads: of [B, K, G].
      arrays: [B, K, ...] each; the first is q, the second k.
      q_tile: most queries in a tile, counted over the G heads.
      k_tile: most keys in a tile.
      keys_first: whether scores are computed with the keys first.

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
        return jax.tree.map(lambda x: cut(jnp.broadcast_to(x[:, None], (batch, kv_heads, x.shape[1]))), tokens)

    def run(some: tuple) -> State:
        q_tokens, k_tokens, heads, arrays = some
        here = relation._replace(q_tokens=q_tokens, k_tokens=k_tokens)
        return attend(Tiles(here, rule, heads, group, q_len, k_len, q_tile, k_tile, keys_first), *arrays)

    tokens = cut_tokens(relation.q_tokens), cut_tokens(relation.k_tokens)
    cuts = (*tokens, jax.tree.map(cut, heads), tuple(map(cut, arrays)))
    if rows == count:
        results = tuple(x[None] for x in run(jax.tree.map(lambda x: x[0], cuts)))
    else:
        results = _map(run, cuts, like=arrays[0])
    return tuple(x.reshape(batch, kv_heads, *x.shape[2:]) for x in results)


def _map(run: Callable[[tuple], State], cuts: tuple, like: jax.Array) -> State:
    """`jax.lax.map(run, cuts)` by way of `loop`; the results are float32."""
    count = jax.tree.leaves(cuts)[0].shape[0]
    shapes = jax.eval_shape(run, jax.tree.map(lambda x: x[0], cuts))

    def step(results: State, at: tuple) -> State:
        i, some = at
        return tuple(x.at[i].set(new) for x, new in zip(results, run(some), strict=True))

    start = tuple(filled(like, (count, *shape.shape)) for shape in shapes)
    return loop(step, start, (jnp.arange(count), cuts))


def _run(length: int, stride: int, segments: jax.Array | None) -> jax.Array:
    """0, stride, 2 stride, ... as int32, [n or 1, length]."""
    run = stride * jnp.arange(length, dtype=jnp.int32)[None]
    # Varies over the devices and over a caller's vmap as segments do: jax would make it vary where the two meet, and
    # cannot under vmap. The compiler removes the 0.
    return run if segments is None else run + 0 * segments[:, :1]


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
    return jax.tree.map(lambda x: x[at], tokens)
