"""Block attention for TPUs, in Pallas: one fused kernel forward, and two backward.

What a tile of scores means is written once, in `mask` and `scores`, and evaluated inside the kernel. The pallas
modules take a third of a second to import: they are, when a kernel is first built.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ringjax.attention.kernels.base import BlockKernel, Relation
from ringjax.attention.kernels.tpu_visits import Cut
from ringjax.attention.scores import ScoreRule
from ringjax.attention.softmax import Partial

LANES = 128


@dataclass(frozen=True)
class TpuKernel(BlockKernel):
    """Fused attention on a TPU's matrix units, with the merge inside.

    A key/value head is fetched once for as many of its G query heads as make up `rows`. With 2048 rows a fetched
    key meets so many queries that every TPU generation computes longer than it fetches. The matrix units want at
    least 256 of everything. Tiles are cut smaller where they would not fit into `vmem`.

    Attributes:
      q_tile: most queries of one head in a tile, a multiple of 128.
      k_tile: most keys of a tile, a multiple of 128.
      rows: most queries in a tile, over all its heads; at least one head is taken.
      vmem: bytes of vector memory. 16 MB is what TPU v4 has; later ones have more.
      interpret: run step by step in plain jax, on any backend, with tiles of any size: for tests.

    Raises:
      ValueError: a tile is not a multiple of 128.
    """

    q_tile: int = 512
    k_tile: int = 1024
    rows: int = 2048
    vmem: int = 16 * 2**20
    interpret: bool = False
    name = "tpu"

    def __post_init__(self) -> None:
        for name in ("q_tile", "k_tile"):
            tile = getattr(self, name)
            if tile < 1 or (tile % LANES and not self.interpret):
                raise ValueError(
                    f"TpuKernel.{name} must be a positive multiple of {LANES}, the width of a register; got {tile}"
                )

    @property
    def check_vma(self) -> bool:
        return not self.interpret  # jax's interpreter of kernels loses track

    def forward(self, q, k, v, relation, rule, heads, before) -> Partial:
        q, k, v = (_supported(x) for x in (q, k, v))
        return self._program(q, k, v, relation, rule).forward(q, k, v, heads, before)

    def backward(self, q, k, v, relation, rule, heads, lse, delta, dout):
        q, k, v, dout = (_supported(x) for x in (q, k, v, dout))
        return self._program(q, k, v, relation, rule).backward(q, k, v, heads, lse, delta, dout)

    def _program(self, q: jax.Array, k: jax.Array, v: jax.Array, relation: Relation, rule: ScoreRule):
        from ringjax.attention.kernels.tpu_program import Program

        q_tile, k_tile, heads = self._tiles(q, k, v)
        cut = Cut(relation, (q.shape[3], k.shape[2]), (q_tile, k_tile))
        return Program(cut, rule, heads, self.vmem, self.interpret)

    def _tiles(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[int, int, int]:
        """Queries of a tile, keys of a tile, and query heads that share a tile of keys."""
        group, q_len, k_len, unit = q.shape[2], q.shape[3], k.shape[2], 1 if self.interpret else LANES
        q_most, k_most, rows = self.q_tile, self.k_tile, self.rows
        while True:
            q_tile, k_tile = _tile(q_len, q_most, unit), _tile(k_len, k_most, unit)
            most = min(group, max(1, rows // q_tile))
            heads = next(heads for heads in range(most, 0, -1) if group % heads == 0)
            if _bytes(q_tile, k_tile, heads, max(q.shape[-1], v.shape[-1]), q.dtype.itemsize) <= self.vmem:
                return q_tile, k_tile, heads
            if k_tile > 256:
                k_most = _half(k_tile)
            elif heads > 1:
                rows = q_tile * (heads - 1)
            elif q_tile > LANES:
                q_most = _half(q_tile)
            else:
                return q_tile, k_tile, heads  # head dims in the thousands: the compiler has the last word


def _bytes(q_tile: int, k_tile: int, heads: int, dim: int, size: int) -> int:
    """What a step needs, for numbers of `size` bytes: tiles, twice if they come or go meanwhile, and scores.

    Of scores and their kin about four in float32 are alive at a time, and the pieces of float32 operands besides: as
    compiled, with the widths used here.
    """
    width = -(-dim // LANES) * LANES
    queries, keys, scores = heads * q_tile * width, k_tile * 2 * width, q_tile * k_tile
    forward = queries * (2 * size + 2 * 8 + 4) + keys * 2 * size
    of_keys = queries * 4 * size + keys * (2 * size + 2 * 4)
    return max(forward, of_keys) + scores * 4 * (3 + size // 2)


def _tile(length: int, most: int, unit: int) -> int:
    """The whole length if it fits; else the largest divisor that is not far below `most`; else `most`."""
    if length <= most:
        return length
    tiles = range(most - most % unit, (most - 1) // 2, -unit)
    return next((tile for tile in tiles if length % tile == 0), most)


def _half(tile: int) -> int:
    """About half of it, in whole registers."""
    return max(LANES, tile // 2 // LANES * LANES)


def _supported(x: jax.Array) -> jax.Array:
    """Kernels on TPUs know no float16; float32 holds all of it."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x
