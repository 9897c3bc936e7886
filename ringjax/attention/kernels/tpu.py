"""Block attention for TPUs, in Pallas: one fused kernel forward, and two backward.

What a tile of scores means is written once, in `mask` and `scores`, and evaluated inside the kernel. The pallas
modules take a third of a second to import: they are, when a kernel is first built.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ringjax.attention.kernels.base import BlockKernel
from ringjax.attention.kernels.visits import Cut
from ringjax.attention.softmax import Partial

LANES = 128


@dataclass(frozen=True)
class TpuKernel(BlockKernel):
    """Fused attention on a TPU's matrix units, with the merge inside.

    A key/value head is fetched once for as many of its G query heads as make up `rows`. With 2048 rows a fetched
    key meets so many queries that every TPU generation computes longer than it fetches, and the scores of one head in
    a pair of tiles take 2 MB of the vector memory; the matrix units want at least 256 of everything.

    Attributes:
      q_tile: queries of one head in a tile, a multiple of 128.
      k_tile: keys of a tile, a multiple of 128.
      rows: most queries in a tile, over all its heads; at least one head is taken.
      interpret: run step by step in plain jax, on any backend, with tiles of any size: for tests.

    Raises:
      ValueError: a tile is not a multiple of 128.
    """

    q_tile: int = 512
    k_tile: int = 1024
    rows: int = 2048
    interpret: bool = False
    name = "tpu"

    def __post_init__(self) -> None:
        for name in ("q_tile", "k_tile"):
            tile = getattr(self, name)
            if tile < 1 or (tile % LANES and not self.interpret):
                raise ValueError(
                    f"TpuKernel.{name} must be a positive multiple of {LANES}, the width of a TPU's vector registers; "
                    f"got {tile}"
                )

    def forward(self, q, k, v, relation, rule, heads, before) -> Partial:
        from ringjax.attention.kernels.tpu_program import Program

        q, k, v = (_supported(x) for x in (q, k, v))
        program = Program(self._cut(q, k, relation), rule, self._heads(q), self.interpret)
        return program.forward(q, k, v, heads, before)

    def backward(self, q, k, v, relation, rule, heads, lse, delta, dout):
        from ringjax.attention.kernels.tpu_program import Program

        q, k, v, dout = (_supported(x) for x in (q, k, v, dout))
        program = Program(self._cut(q, k, relation), rule, self._heads(q), self.interpret)
        return program.backward(q, k, v, heads, lse, delta, dout)

    def _cut(self, q: jax.Array, k: jax.Array, relation) -> Cut:
        lengths = q.shape[3], k.shape[2]
        unit = 1 if self.interpret else LANES
        tiles = _tile(lengths[0], self.q_tile, unit), _tile(lengths[1], self.k_tile, unit)
        return Cut(relation, lengths, tiles)

    def _heads(self, q: jax.Array) -> int:
        """How many query heads share a fetch: a divisor of G."""
        group, most = q.shape[2], max(1, self.rows // min(self.q_tile, q.shape[3]))
        return next(heads for heads in range(min(group, most), 0, -1) if group % heads == 0)


def _tile(length: int, most: int, unit: int) -> int:
    """The whole length if it fits; else the largest divisor that is not far below `most`; else `most`."""
    if length <= most:
        return length
    tiles = range(most - most % unit, (most - 1) // 2, -unit)
    return next((tile for tile in tiles if length % tile == 0), most)


def _supported(x: jax.Array) -> jax.Array:
    """Kernels on TPUs know no float16; float32 holds all of it."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x
