"""The ways key/value blocks take from device to device.

Usually they go around the ring, R - 1 hops, and every query meets every key. If a window is short, they go along the
sequence instead, to those neighbours only whose queries can see them.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TypeVar

import jax
import jax.numpy as jnp

from ringjax.attention.kernels.base import Lead
from ringjax.attention.layout import Layout
from ringjax.attention.mask import Mask
from ringjax.attention.meeting import Call, foreign_call, neighbour_call, own_call

T = TypeVar("T")


class Route(ABC):
    """Where blocks go. Methods run on one device's block, inside `shard_map`.

    What travels has its slots in the middle: dim 2 of keys, values and gradients, dim 1 of tokens.

    Attributes:
      steps: how many foreign blocks (or sets of chunks) a device meets.
    """

    steps: int

    @abstractmethod
    def hop(self, x: T) -> T:
        """What arrives when every device sends x one hop on."""

    @abstractmethod
    def home(self, x: T) -> T:
        """What arrives when every device sends x back to where the block it met last comes from."""

    @abstractmethod
    def call(self, step: jax.Array | int) -> Call:
        """What to do with the block that has made `step` hops, 1 ... steps."""

    @abstractmethod
    def positions(self, step: jax.Array | int, length: int) -> jax.Array:
        """The layout's positions of that block, [length]."""


@dataclass(frozen=True)
class Circle(Route):
    """Around the ring: at step i a device meets the block born i ranks before it."""

    axis: str
    size: int
    layout: Layout
    mask: Mask
    by_position: bool

    @property
    def steps(self) -> int:  # type: ignore[override]
        return self.size - 1

    def hop(self, x: T) -> T:
        return jax.lax.ppermute(x, self.axis, [(i, (i + 1) % self.size) for i in range(self.size)])

    def home(self, x: T) -> T:
        return self.hop(x)  # after R - 1 hops home is the next rank

    def call(self, step: jax.Array | int) -> Call:
        rank = jax.lax.axis_index(self.axis)
        return foreign_call(self.layout, self.mask, self.by_position, self.size, rank, self._source(step))

    def positions(self, step: jax.Array | int, length: int) -> jax.Array:
        return self.layout.block_positions(self._source(step), self.size, length, jnp)

    def _source(self, step: jax.Array | int) -> jax.Array:
        return (jax.lax.axis_index(self.axis) - step) % self.size


@dataclass(frozen=True)
class Line(Route):
    """Along the sequence: at step i each chunk meets the one i places before it (way 1) or after it (way -1).

    In the zigzag layout, early chunks then come from one neighbour and late ones from the other, and in the middle
    of the sequence, where the last rank's two chunks touch, from the device itself. Behind the last chunk follows
    the first one: what leaves the sequence at one end meets nobody there, and finds its way home from the other.
    """

    axis: str
    size: int
    layout: Layout
    steps: int
    chunk_len: int
    way: int

    def hop(self, x: T) -> T:
        return jax.tree.map(lambda leaf: self._shift(leaf, self.way), x)

    def home(self, x: T) -> T:
        return jax.tree.map(lambda leaf: self._shift(leaf, -self.way * self.steps), x)

    def call(self, step: jax.Array | int) -> Call:
        nearest, furthest = (step, step) if isinstance(step, int) else (1, self.steps)
        ends = sorted(self.way * places * self.chunk_len for places in (nearest, furthest))
        lead = Lead(1, self.way * step * self.chunk_len, *ends)
        places = [self._place(chunk) - self.way * step for chunk in range(self.layout.chunks)]
        exists = [(place >= 0) & (place < self.size * self.layout.chunks) for place in places]
        return neighbour_call(self.layout.chunks, lead, jnp.stack(exists))

    def positions(self, step: jax.Array | int, length: int) -> jax.Array:
        own = self.layout.block_positions(jax.lax.axis_index(self.axis), self.size, length, jnp)
        return own - self.way * step * self.chunk_len

    def _place(self, chunk: int) -> jax.Array:
        place = self.layout.place(chunk, jax.lax.axis_index(self.axis), self.size)
        assert place is not None
        return place

    def _shift(self, x: jax.Array, by: int) -> jax.Array:
        """Every chunk of x moved `by` places along the sequence."""
        chunks, dim = range(self.layout.chunks), x.ndim // 2
        parts = jnp.split(x, len(chunks), axis=dim)
        arrived = [
            reduce(
                add,
                [self._send(parts[source], ways) for source in chunks if (ways := self._ways(source, chunk, by))],
            )
            for chunk in chunks
        ]
        return jnp.concatenate(arrived, axis=dim)

    def _ways(self, source: int, chunk: int, by: int) -> list[tuple[int, int]]:
        """Pairs of ranks (a, b) such that chunk `source` of a, moved by `by`, becomes `chunk` of b."""
        place, count = self.layout.place, self.size * self.layout.chunks
        ranks = range(self.size)
        ends = {place(chunk, b, self.size): b for b in ranks}
        starts = {a: (place(source, a, self.size) + by) % count for a in ranks}  # type: ignore[operator]
        return [(a, ends[end]) for a, end in starts.items() if end in ends]

    def _send(self, x: jax.Array, ways: list[tuple[int, int]]) -> jax.Array:
        if any(a != b for a, b in ways):
            return jax.lax.ppermute(x, self.axis, ways)
        rank = jax.lax.axis_index(self.axis)
        stays = reduce(jnp.logical_or, [rank == b for _, b in ways])
        return jnp.where(stays, x, jnp.zeros((), x.dtype))


def routes(
    axis: str, size: int, layout: Layout, mask: Mask, by_position: bool, length: int
) -> tuple[Call, tuple[Route, ...]]:
    """What a device does with its own block, and the ways foreign blocks reach it.

    Args:
      axis: the ring's mesh axis.
      size: R.
      layout: where tokens sit.
      mask: what may attend to what.
      by_position: positions are the caller's and not the layout's.
      length: L.
    """
    circle = Circle(axis, size, layout, mask, by_position)
    own = own_call(layout, mask, by_position, size)
    runs = layout.place(0, 0, size) is not None
    if size == 1 or mask.window is None or mask.has_prefix or by_position or not runs:
        return own, (circle,)
    chunk_len = length // layout.chunks
    steps = -(-(mask.window - 1) // chunk_len)  # how many chunks away the furthest visible key is
    ways = (1,) if mask.causal else (1, -1)
    if steps * len(ways) > size - 1:
        return own, (circle,)
    lines = tuple(Line(axis, size, layout, steps, chunk_len, way) for way in ways) if steps else ()
    return neighbour_call(layout.chunks, Lead(), None), lines
