"""Which pairs of tiles a kernel visits, worked out before it starts.

A program of a kernel owns one tile of one side, and walks over tiles of the other. Letters: r tiles owned, w tiles
walked over.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ringjax.attention.kernels.base import Order, Relation
from ringjax.attention.mask import Mask, Tokens, may_meet, must_meet


class Extent(NamedTuple):
    """The slots of a call on one side, cut into tiles; the last one may be filled in part only."""

    length: int
    tile: int

    @property
    def tiles(self) -> int:
        return -(-self.length // self.tile)

    @property
    def filled(self) -> int:
        """Slots of all tiles."""
        return self.tiles * self.tile

    @property
    def over(self) -> int:
        """By how much the last tile reaches beyond the slots."""
        return self.filled - self.length


def width_of(dim: int) -> int:
    """Triton's arrays have sizes that are powers of two, and 16 is the least that tensor cores multiply."""
    return max(16, 1 << (dim - 1).bit_length())


class Visits(NamedTuple):
    """The way of each tile owned: it walks over places, of which some are clear and some are edges.

    In a clear pair of tiles every query sees every key; in an edge some do.

    Attributes:
      bounds: [B or 1, r, 4] int32. Places bounds[1] ... bounds[2] - 1 are clear, bounds[0] ... bounds[1] - 1 and
        bounds[2] ... bounds[3] - 1 are edges.
      order: [B or 1, r, w] int32, the tile at each place; None = place n is tile n.
    """

    bounds: jax.Array
    order: jax.Array | None = None


def comparing(relation: Relation) -> Mask:
    """What positions are compared by: a full mask if they hide nothing."""
    return Mask(causal=False) if relation.order is Order.ALL else relation.mask


def all_clear(relation: Relation, k: Extent) -> bool:
    """Whether it is known beforehand that there are no edges."""
    return comparing(relation).is_full and relation.q_tokens.segments is None and k.length % k.tile == 0


def visits(relation: Relation, q: Extent, k: Extent, by_keys: bool = False) -> Visits:
    """The way of each tile of queries over the tiles of keys, or the other way round.

    If slots alone decide, it is a few numbers per tile; if data do, a list of all tiles, which takes (L / tile)^2
    numbers, and each sequence has its own.
    """
    mask = comparing(relation)
    given = relation.q_tokens.segments is not None
    if given or (relation.order is Order.ANY and not mask.is_full):
        return _listed(relation, mask, q, k, by_keys)
    return _band(relation, mask, q, k, by_keys)


def _band(relation: Relation, mask: Mask, q: Extent, k: Extent, by_keys: bool) -> Visits:
    """Query slot i sees key slots i + first ... i + last, that is key slot j is seen by j - last ... j - first."""
    stride, by, *_ = relation.lead
    low, high = mask.differences
    everything = q.length + k.length
    last = everything if mask.is_full else (by - low) // stride
    first = -everything if mask.is_full or mask.window is None else -((high - by) // stride)
    if by_keys:
        return _walk(-jnp.int32(last), -jnp.int32(first), k, q)
    return _walk(jnp.int32(first), jnp.int32(last), q, k)


def _walk(first: jax.Array, last: jax.Array, own: Extent, other: Extent) -> Visits:
    """`Visits` if slot i meets slots i + first ... i + last of the other side. A tile filled in part is an edge."""
    start = jnp.arange(own.tiles) * own.tile
    end = jnp.minimum(start + own.tile, own.length) - 1
    from_tile = jnp.clip((start + first) // other.tile, 0, other.tiles)
    to_tile = jnp.clip((end + last) // other.tile + 1, from_tile, other.tiles)
    clear_from = -(-(end + first) // other.tile)
    clear_to = jnp.minimum(start + last + 1, other.length) // other.tile
    clear_from = jnp.clip(clear_from, from_tile, to_tile)
    clear_to = jnp.clip(clear_to, clear_from, to_tile)
    return Visits(jnp.stack([from_tile, clear_from, clear_to, to_tile], axis=-1)[None].astype(jnp.int32))


def _listed(relation: Relation, mask: Mask, q: Extent, k: Extent, by_keys: bool) -> Visits:
    q_tokens, k_tokens = relation.q_tokens, relation.k_tokens
    if relation.order is Order.ALL:
        q_tokens, k_tokens = q_tokens._replace(positions=None), k_tokens._replace(positions=None)
    elif relation.order is Order.SLOTS:
        stride, by, *_ = relation.lead
        q_tokens = q_tokens._replace(positions=(stride * jnp.arange(q.length, dtype=jnp.int32) + by)[None])
        k_tokens = k_tokens._replace(positions=(stride * jnp.arange(k.length, dtype=jnp.int32))[None])
    leaves = jax.tree.leaves((q_tokens, k_tokens))
    batch = max(x.shape[0] for x in leaves)

    def cut(x: jax.Array, side: Extent) -> jax.Array:
        # Repeating the last token leaves the range of its tile as it is.
        x = jnp.pad(x, ((0, 0), (0, side.filled - side.length)), mode="edge")
        return jnp.broadcast_to(x, (batch, side.filled)).reshape(batch, side.tiles, 1, side.tile)

    def of_sequence(q_tokens: Tokens, k_tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        may, must = may_meet(mask, q_tokens, k_tokens), must_meet(mask, q_tokens, k_tokens)
        assert may is not None, "nothing hides a pair of tiles"
        assert must is not None, "nothing hides a pair of tiles"
        return may, must

    may, must = jax.vmap(of_sequence)(
        jax.tree.map(lambda x: cut(x, q), q_tokens), jax.tree.map(lambda x: cut(x, k), k_tokens)
    )
    if k.length % k.tile:
        must = must & (jnp.arange(k.tiles) < k.tiles - 1)
    if by_keys:
        may, must = may.swapaxes(1, 2), must.swapaxes(1, 2)
    others = may.shape[-1]
    # Clear tiles come first, then edges, then those that are not visited; each in their order.
    kind = jnp.where(must, 0, jnp.where(may, 1, 2))
    order = jnp.sort(kind * others + jnp.arange(others), axis=-1) % others
    clear, needed = must.sum(-1), (must | may).sum(-1)
    none = jnp.zeros_like(clear)
    return Visits(jnp.stack([none, none, clear, needed], axis=-1).astype(jnp.int32), order.astype(jnp.int32))
