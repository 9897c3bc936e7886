"""Layouts: which token sits in which slot of which device of the ring.

A layout cuts the sequence into chunks, affine runs of tokens, and gives each of the R devices the same number of
them. Slot j of a block on rank r holds one global position; everything else (masks, RoPE, the host's permutation)
follows from that. Pure arithmetic: it works on Python ints, numpy arrays and traced jax values alike, and touches
no device.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

Array = Any  # numpy or jax; the arithmetic below is the same


class Layout(ABC):
    """Assignment of the S tokens of a sequence to the slots of R blocks of L = S / R tokens.

    Attributes:
      name: the name users give.
      chunks: affine runs in one block. L must be a multiple of it.
    """

    name: str
    chunks: int

    @abstractmethod
    def chunk_start(self, chunk: Array, rank: Array, ring: int, length: int) -> Array:
        """Global position of the first token of a chunk on a rank; `length` is L, `chunk` in [0, chunks)."""

    def stride(self, ring: int) -> int:
        """Distance between the global positions of neighbouring slots of a chunk."""
        return 1

    def place(self, chunk: Array, rank: Array, ring: int) -> Array | None:
        """Which of the sequence's ring * chunks runs of tokens a chunk is; None if chunks are no such runs."""
        return None

    def multiple(self, ring: int) -> int:
        """What a sequence length must be a multiple of to fill the blocks of a ring of this size."""
        return ring * self.chunks

    def filled(self, seq_len: int, ring: int) -> int:
        """The next length that fills the blocks."""
        return -(-seq_len // self.multiple(ring)) * self.multiple(ring)

    def check(self, seq_len: int, ring: int) -> None:
        """Raise ValueError unless `seq_len` tokens fill the blocks of `ring` devices."""
        if ring < 1:
            raise ValueError(f"the ring must be at least 1, got {ring}")
        if seq_len < 1 or seq_len % self.multiple(ring):
            below = seq_len // self.multiple(ring) * self.multiple(ring)
            nearest = " or ".join(str(n) for n in (below, below + self.multiple(ring)) if n)
            raise ValueError(
                f"layout '{self.name}' on a ring of {ring} needs a sequence length that is a multiple of "
                f"{self.multiple(ring)}, got {seq_len}; use {nearest}, or pad the sequence to it"
            )

    def block_positions(self, rank: Array, ring: int, length: int, xp: Any = np) -> Array:
        """Global positions of the L slots of one block, [L] int32.

        Args:
          rank: the block's device in the ring; may be a traced value if `xp` is jax.numpy.
          ring: R.
          length: L.
          xp: the array module to compute with, numpy or jax.numpy.
        """
        size = length // self.chunks
        run = xp.arange(size, dtype=xp.int32) * self.stride(ring)
        starts = [self.chunk_start(chunk, rank, ring, length) for chunk in range(self.chunks)]
        return xp.concatenate([run + start for start in starts]).astype(xp.int32)

    def positions(self, seq_len: int, ring: int) -> np.ndarray:
        """Global position of every slot, in sharded order: block of rank 0, block of rank 1, ...

        A length that does not fill the blocks is laid out like the next one that does, and the slots of the tokens
        that are not there are left out; `ring_attention` puts padding into them.

        Args:
          seq_len: S.
          ring: R.

        Returns:
          [S] int32, a permutation of 0 ... S - 1.

        Raises:
          ValueError: seq_len or ring is less than 1.

        Example:
          >>> from ringjax.attention import get_layout
          >>> get_layout("zigzag").positions(8, ring=2)
          array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
        """
        for name, value in (("sequence length", seq_len), ("ring", ring)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"the {name} must be an integer of at least 1, got {value!r}")
        length = self.filled(seq_len, ring) // ring
        positions = np.concatenate([self.block_positions(rank, ring, length) for rank in range(ring)])
        return positions[positions < seq_len]

    def permute(self, x: Array, ring: int, axis: int = 1) -> Array:
        """Reorder dim `axis` of x, in natural order, into layout order."""
        _check_dim(x, axis)
        return x.take(self.positions(x.shape[axis], ring), axis=axis)

    def unpermute(self, x: Array, ring: int, axis: int = 1) -> Array:
        """Reorder dim `axis` of x, in layout order, into natural order: the inverse of `permute`."""
        _check_dim(x, axis)
        return x.take(np.argsort(self.positions(x.shape[axis], ring)), axis=axis)


class Contiguous(Layout):
    """Rank r holds tokens rL ... rL + L - 1. Natural order; with a causal mask late ranks do most of the work."""

    name = "contiguous"
    chunks = 1

    def chunk_start(self, chunk: Array, rank: Array, ring: int, length: int) -> Array:
        return rank * length

    def place(self, chunk: Array, rank: Array, ring: int) -> Array:
        return rank


class Zigzag(Layout):
    """Rank r holds chunks r and 2R - 1 - r of 2R: every rank does the same work under a causal mask."""

    name = "zigzag"
    chunks = 2

    def chunk_start(self, chunk: Array, rank: Array, ring: int, length: int) -> Array:
        return self.place(chunk, rank, ring) * (length // 2)

    def place(self, chunk: Array, rank: Array, ring: int) -> Array:
        return rank + chunk * (2 * ring - 1 - 2 * rank)  # r for chunk 0, 2R - 1 - r for chunk 1


class Striped(Layout):
    """Rank r holds the tokens whose position is r modulo R (Striped Attention, arXiv:2311.09431)."""

    name = "striped"
    chunks = 1

    def chunk_start(self, chunk: Array, rank: Array, ring: int, length: int) -> Array:
        return rank

    def stride(self, ring: int) -> int:
        return ring


def _check_dim(x: Array, axis: int) -> None:
    if not hasattr(x, "ndim"):
        raise ValueError(f"only arrays have an order of tokens; got {type(x).__name__}")
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer) or not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be a dim of the array, and is {axis}; the array has shape {x.shape}")


LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (Contiguous(), Zigzag(), Striped())}


def get_layout(name: str) -> Layout:
    """Return the layout called `name`: "contiguous", "zigzag" or "striped".

    Raises:
      ValueError: there is no such layout.
    """
    if not isinstance(name, str):
        raise ValueError(f"a layout is given by its name, one of {', '.join(LAYOUTS)}; got {type(name).__name__}")
    if name not in LAYOUTS:
        raise ValueError(f"unknown layout {name!r}; the layouts are {', '.join(LAYOUTS)}")
    return LAYOUTS[name]
