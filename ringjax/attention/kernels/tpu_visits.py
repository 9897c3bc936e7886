"""The order in which a kernel with a grid visits pairs of tiles, as a table that its scalar core reads.

A grid has one step per pair that can hold visible pairs of tokens, as far as that is known when the program is
built. What is known from data alone is looked up: whether the pair is needed, and whether all of it is visible.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.attention.kernels.base import Order, Relation
from ringjax.attention.kernels.tiles import candidates
from ringjax.attention.mask import Tokens, may_meet, visible

# Entries of the table, 4 bytes each: three quarters of the scalar memory of a TPU core.
MOST_ENTRIES = 3 * 2**16


class Visits(NamedTuple):
    """Pairs of a tile that stays and a tile that comes, all pairs of one staying tile after another.

    Attributes:
      stays: [T] int32, number of the staying tile. Each one occurs.
      comes: [B or 1, T] int32, a code: 4 times the number of the coming tile, + 1 if the pair is needed, + 2 if all
        of it is visible. A pair that is not needed has the tile of the pair before it: nothing is fetched for it.
    """

    stays: jax.Array | np.ndarray
    comes: jax.Array


@dataclass(frozen=True)
class Cut:
    """How two blocks are cut into tiles.

    Attributes:
      relation: what sees what, with tokens of [B or 1, L].
      lengths: of the blocks of queries and of keys.
      tiles: queries and keys of a tile. The last tiles may hang over.
    """

    relation: Relation
    lengths: tuple[int, int]
    tiles: tuple[int, int]

    @property
    def counts(self) -> tuple[int, int]:
        """Number of tiles of queries and of keys."""
        (q_len, k_len), (q_tile, k_tile) = self.lengths, self.tiles
        return -(-q_len // q_tile), -(-k_len // k_tile)

    @property
    def overhang(self) -> tuple[bool, bool]:
        """Whether the last tile of queries, of keys, is longer than what is left for it."""
        (q_len, k_len), (q_tile, k_tile) = self.lengths, self.tiles
        return q_len % q_tile > 0, k_len % k_tile > 0

    @property
    def kinds(self) -> tuple[bool, bool]:
        """Whether there may be pairs that are all visible, and pairs that are not."""
        relation = self.relation
        clear, edge = candidates(relation, self.lengths, self.tiles)
        q_over, k_over = self.overhang
        inner_q, inner_k = (count - over for count, over in zip(self.counts, self.overhang, strict=True))
        may_be_clear = len(clear) > 0 or relation.order is Order.ANY or relation.lead.low < relation.lead.high
        may_be_edge = len(edge) > 0 or relation.q_tokens.segments is not None or q_over or k_over
        return may_be_clear and inner_q > 0 and inner_k > 0, may_be_edge

    def visits(self, keys_stay: bool) -> Visits:
        """The table, with the queries' tiles staying or with the keys'.

        Raises:
          ValueError: it would not fit into scalar memory.
        """
        pairs, real = self._pairs(int(keys_stay))
        need, clear = self._judged()
        need = jnp.asarray(real) & need[:, pairs[:, 0], pairs[:, 1]]
        whole = np.all([(at < count - 1) | (not over) for at, count, over in self._ends(pairs)], axis=0)
        clear = clear[:, pairs[:, 0], pairs[:, 1]] & whole
        if len(pairs) + need.size > MOST_ENTRIES:
            raise ValueError(
                f"kernel tpu looks up at most {MOST_ENTRIES} entries for pairs of tiles; {self.lengths} tokens in "
                f"tiles of {self.tiles} take {len(pairs) + need.size}: give it larger tiles and the memory for them, "
                "TpuKernel(q_tile=..., k_tile=..., vmem=...), or put fewer tokens on a device"
            )
        stays, comes = (pairs[:, 1], pairs[:, 0]) if keys_stay else (pairs[:, 0], pairs[:, 1])
        # The needed visit at or before each visit, or else the first one.
        latest = jax.lax.cummax(jnp.where(need, jnp.arange(len(pairs)), -1), axis=1)
        source = jnp.where(latest < 0, jnp.argmax(need, axis=1, keepdims=True), latest)
        return Visits(stays, 4 * jnp.asarray(comes)[source] + 2 * clear + need)

    def _pairs(self, stays: int) -> tuple[np.ndarray, np.ndarray]:
        """Pairs (i, j) to visit, and whether they stand for something; every staying tile must be visited."""
        found = np.concatenate(candidates(self.relation, self.lengths, self.tiles))
        missing = np.setdiff1d(np.arange(self.counts[stays]), found[:, stays])
        added = np.zeros((len(missing), 2), np.int32)
        added[:, stays] = missing
        pairs, real = np.concatenate([found, added]), np.arange(len(found) + len(added)) < len(found)
        order = np.lexsort((pairs[:, 1 - stays], pairs[:, stays]))
        return pairs[order], real[order]

    def _ends(self, pairs: np.ndarray):
        return zip(pairs.T, self.counts, self.overhang, strict=True)

    def _judged(self) -> tuple[jax.Array, jax.Array]:
        """Which pairs of tiles may hold visible pairs, and which hold no others, [B or 1, q tiles, k tiles]."""
        mask, (q, k) = self.relation.mask, self._ranges()
        arrays = jax.tree.leaves((q, k))
        batch = max((x.shape[0] for x in arrays), default=1)
        everywhere = jnp.ones((batch, *self.counts), bool)
        if not arrays:
            return everywhere, everywhere
        # What is near in positions is a convex set: a rectangle is inside if its corners are. A prefix spoils that.
        near = replace(mask, prefix_length=None)

        def judge(q: Tokens, k: Tokens) -> tuple[jax.Array | None, jax.Array | None]:
            meet = may_meet(mask, *(jax.tree.map(lambda x: x[:, None], side) for side in (q, k)))
            seen = visible(
                near,
                jax.tree.map(lambda x: x[:, None, :, None], q),
                jax.tree.map(lambda x: x[None, :, None, :], k),
            )
            return meet, None if seen is None else seen.all((-1, -2))

        q, k = (jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])), side) for side in (q, k))
        need, clear = jax.vmap(judge)(q, k)
        return everywhere if need is None else need, everywhere if clear is None else clear

    def _ranges(self) -> tuple[Tokens, Tokens]:
        """Least and greatest position and segment of each tile, [B or 1, tiles, 2]; None where they hide nothing."""
        order, mask = self.relation.order, self.relation.mask
        sides = []
        by = lead_by(self.relation)
        tokens = (self.relation.q_tokens, self.relation.k_tokens)
        for side, length, tile, ahead in zip(tokens, self.lengths, self.tiles, (by, 0), strict=True):
            positions = None if side.positions is None else _range(side.positions, tile)
            if order is Order.ALL or mask.is_full:
                positions = None
            elif order is Order.SLOTS:
                first = np.arange(0, length, tile)
                ends = np.stack([first, np.minimum(first + tile, length) - 1], axis=-1)[None].astype(np.int32)
                positions = self.relation.lead.stride * jnp.asarray(ends) + ahead
            sides.append(Tokens(positions, None if side.segments is None else _range(side.segments, tile)))
        return sides[0], sides[1]


def lead_by(relation: Relation) -> jax.Array | int:
    """How far queries are ahead in position of keys of the same slot."""
    lead = relation.lead
    return lead.low if lead.low == lead.high else lead.by


def _range(x: jax.Array, tile: int) -> jax.Array:
    """[B, L] -> [B, tiles, 2]"""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % tile)), mode="edge")
    x = x.reshape(x.shape[0], -1, tile)
    return jnp.stack([x.min(-1), x.max(-1)], axis=-1)
