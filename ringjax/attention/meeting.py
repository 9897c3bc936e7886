"""What a query block has to do with a key block when they meet in the ring.

The answer is a list of `Call`s: kernel calls on whole blocks or on their chunks. It is the one place where layout
and mask decide the work, and forward and backward both follow it. Calls are the same in number and size on every
rank; where ranks differ, they differ in chunk indices, shifts and conditions, which are traced values.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ringjax.attention.kernels.base import Order
from ringjax.attention.layout import Layout
from ringjax.attention.mask import Mask


class Call(NamedTuple):
    """One kernel call.

    Attributes:
      q_chunk: which chunk of the query block, or None for the whole block.
      k_chunk: which chunk of the key block, or None for the whole block.
      order: what is known of the slots.
      shift: for Order.LOWER: slot i sees slot j when i >= j + shift. 0 or 1.
      when: the call is needed only when this holds; None = always.
    """

    q_chunk: jax.Array | int | None = None
    k_chunk: jax.Array | int | None = None
    order: Order = Order.ALL
    shift: jax.Array | int = 0
    when: jax.Array | None = None


def own_calls(mask: Mask, by_position: bool) -> list[Call]:
    """A block against itself. In every layout a block's slots are in the order of its positions."""
    if mask.is_full:
        return [Call()]
    return [Call(order=Order.ANY if by_position else Order.LOWER)]


def foreign_calls(layout: Layout, mask: Mask, by_position: bool, rank: jax.Array, source: jax.Array) -> list[Call]:
    """The queries of `rank` against the keys of another rank, `source`.

    Args:
      layout: where tokens sit.
      mask: what may attend to what.
      by_position: positions are the caller's and not the layout's, so nothing is known before they are seen.
      rank: this device's place in the ring.
      source: the place the keys come from.
    """
    if mask.is_full:
        return [Call()]
    if by_position:
        return [Call(order=Order.ANY)]
    return _CAUSAL[layout.name](source < rank)


def _contiguous(earlier: jax.Array) -> list[Call]:
    return [Call(when=earlier)]


def _zigzag(earlier: jax.Array) -> list[Call]:
    # Chunk 1 of every rank comes after chunk 0 of every rank. Of the other pairs exactly one is visible: my chunk 0
    # sees the source's chunk 0 if that rank is earlier, otherwise my chunk 1 sees its chunk 1. Either way it is
    # half of the block pair, without a mask and without a branch.
    same = jnp.where(earlier, 0, 1)
    return [Call(1, 0), Call(same, same)]


def _striped(earlier: jax.Array) -> list[Call]:
    # Slot j of the source is token j R + source: it comes before my slot j only if its rank does.
    return [Call(order=Order.LOWER, shift=jnp.where(earlier, 0, 1))]


_CAUSAL: dict[str, Callable[[jax.Array], list[Call]]] = {
    "contiguous": _contiguous,
    "zigzag": _zigzag,
    "striped": _striped,
}
