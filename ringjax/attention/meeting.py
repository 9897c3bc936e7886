"""What a query block has to do with a key block when they meet in the ring.

The answer is a `Call`: one kernel call on the whole blocks, or a few of the same size on chunks of them. It is the
one place where layout and mask decide the work, and forward and backward both follow it. Calls are the same in
number and size on every rank; where ranks differ, they differ in chunk indices, shifts and conditions, which are
traced values.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ringjax.attention.kernels.base import Order
from ringjax.attention.layout import Layout
from ringjax.attention.mask import Mask


class Chunks(NamedTuple):
    """Pairs of chunks that attend to each other, [pairs] int32 each. They run in a loop: one body, however many."""

    q: jax.Array
    k: jax.Array


class Call(NamedTuple):
    """What has to be computed.

    Attributes:
      order: what is known of the slots.
      shift: for Order.LOWER: slot i sees slot j when i >= j + shift. 0 or 1.
      chunks: the pairs of chunks; None = the whole blocks.
      when: it is needed only when this holds; None = always.
    """

    order: Order = Order.ALL
    shift: jax.Array | int = 0
    chunks: Chunks | None = None
    when: jax.Array | None = None


def own_call(mask: Mask, by_position: bool) -> Call:
    """A block against itself. In every layout a block's slots are in the order of its positions."""
    if mask.is_full:
        return Call()
    return Call(Order.ANY if by_position else Order.LOWER)


def foreign_call(layout: Layout, mask: Mask, by_position: bool, rank: jax.Array, source: jax.Array) -> Call:
    """The queries of `rank` against the keys of another rank, `source`.

    Args:
      layout: where tokens sit.
      mask: what may attend to what.
      by_position: positions are the caller's and not the layout's, so nothing is known before they are seen.
      rank: this device's place in the ring.
      source: the place the keys come from.
    """
    if mask.is_full:
        return Call()
    if by_position:
        return Call(Order.ANY)
    return _CAUSAL[layout.name](source < rank)


def _contiguous(earlier: jax.Array) -> Call:
    return Call(when=earlier)


def _zigzag(earlier: jax.Array) -> Call:
    # Chunk 1 of every rank comes after chunk 0 of every rank. Of the other pairs exactly one is visible: my chunk 0
    # sees the source's chunk 0 if that rank is earlier, otherwise my chunk 1 sees its chunk 1. Either way it is
    # half of the block pair, without a mask and without a branch.
    same = jnp.where(earlier, 0, 1)
    return Call(chunks=Chunks(jnp.stack([jnp.ones_like(same), same]), jnp.stack([jnp.zeros_like(same), same])))


def _striped(earlier: jax.Array) -> Call:
    # Slot j of the source is token j R + source: it comes before my slot j only if its rank does.
    return Call(Order.LOWER, shift=jnp.where(earlier, 0, 1))


_CAUSAL: dict[str, Callable[[jax.Array], Call]] = {
    "contiguous": _contiguous,
    "zigzag": _zigzag,
    "striped": _striped,
}
