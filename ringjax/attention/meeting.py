"""What a query block has to do with a key block when they meet in the ring.

The answer is a `Call`: one kernel call on the whole blocks, or a few of the same size on chunks of them. It is the
one place where layout and mask decide the work, and forward and backward both follow it. Calls are the same in
number and size on every rank; where ranks differ, they differ in chunk indices, leads and conditions, which are
traced values.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ringjax.attention.kernels.base import Lead, Order, Slots, all_slots
from ringjax.attention.layout import Layout
from ringjax.attention.mask import Mask


class Chunks(NamedTuple):
    """Pairs of chunks that attend to each other. They run in a loop: one body, however many."""

    q: jax.Array  # [pairs] int32
    k: jax.Array  # [pairs] int32
    when: jax.Array | None = None  # [pairs] bool, which of them are needed; None = all


class Call(NamedTuple):
    """What has to be computed.

    Attributes:
      order: what is known of the positions.
      lead: for Order.SLOTS.
      chunks: the pairs of chunks; None = the whole blocks.
      when: it is needed only when this holds; None = always.
    """

    order: Order = Order.ALL
    lead: Lead = Lead()
    chunks: Chunks | None = None
    when: jax.Array | None = None


def own_call(layout: Layout, mask: Mask, by_position: bool, ring: int) -> Call:
    """A block against itself.

    Args:
      layout: where tokens sit.
      mask: what may attend to what.
      by_position: positions are the caller's and not the layout's, so nothing is known before they are seen.
      ring: R.
    """
    if mask.is_full:
        return Call()
    if by_position or mask.has_prefix:
        return Call(Order.ANY)
    if mask.window is None or layout.chunks == 1 or ring == 1:
        # A block's slots are in the order of its positions in every layout, and one stride apart within a chunk.
        return Call(Order.SLOTS, Lead(layout.stride(ring)))
    return Call(Order.ANY)


def foreign_call(
    layout: Layout, mask: Mask, by_position: bool, ring: int, rank: jax.Array, source: jax.Array
) -> Call:
    """The queries of `rank` against the keys of another rank, `source`; other arguments as in `own_call`."""
    if mask.is_full:
        return Call()
    if by_position or mask.has_prefix:
        return Call(Order.ANY)
    if layout.name == "striped":
        # Slot i of rank r is token i R + r: of slots of the same number, the later rank's is ahead.
        return Call(Order.SLOTS, Lead(ring, rank - source, 1 - ring, ring - 1))
    if mask.window is not None:
        return Call(Order.ANY)
    if layout.name == "zigzag":
        return _zigzag_causal(source < rank)
    return Call(when=source < rank)


def _zigzag_causal(earlier: jax.Array) -> Call:
    # Chunk 1 of every rank comes after chunk 0 of every rank. Of the other pairs exactly one is visible: my chunk 0
    # sees the source's chunk 0 if that rank is earlier, otherwise my chunk 1 sees its chunk 1. Either way it is
    # half of the block pair, without a mask and without a branch.
    same = jnp.where(earlier, 0, 1)
    return Call(chunks=Chunks(jnp.stack([jnp.ones_like(same), same]), jnp.stack([jnp.zeros_like(same), same])))


def halves(call: Call, length: int) -> list[tuple[Call, Slots]]:
    """The same work in two parts, if it has two: calls, each with the slots of the queries that it is for.

    Args:
      call: what has to be computed.
      length: slots of the queries' block.
    """
    if call.chunks is not None:
        pairs = call.chunks.q.shape[0]
        cuts = [slice(0, pairs // 2), slice(pairs // 2, pairs)] if pairs > 1 else [slice(0, pairs)]
        parts = [jax.tree.map(lambda x, cut=cut: x[cut], call.chunks) for cut in cuts]
        return [(call._replace(chunks=part), all_slots(length)) for part in parts]
    if length == 1:
        return [(call, all_slots(length))]
    start = length // 2
    ahead, lead = call.lead.stride * start, call.lead
    later = lead._replace(by=lead.by + ahead, low=lead.low + ahead, high=lead.high + ahead)
    return [
        (call, Slots(0, start, start)),
        (call._replace(lead=later), Slots(start, length - start, start)),
    ]


def neighbour_call(chunks: int, lead: Lead, when: jax.Array | None) -> Call:
    """Each chunk of the queries against the chunk of the keys that lies a fixed way before or after it.

    Args:
      chunks: in a block.
      lead: of each chunk of queries over its chunk of keys.
      when: [chunks] bool, whether there is such a chunk at all; None = always.
    """
    if chunks == 1:
        return Call(Order.SLOTS, lead, when=None if when is None else when[0])
    pairs = jnp.arange(chunks)
    return Call(Order.SLOTS, lead, Chunks(pairs, pairs, when))
