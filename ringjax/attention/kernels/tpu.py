"""Block attention for TPUs, in Pallas: one fused kernel forward, and two backward.

What a tile of scores means is written once, in `mask` and `scores`, and evaluated inside the kernel. The pallas
modules take a third of a second to import: they are, when a kernel is first built.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ringjax.attention.kernels.base import BlockKernel, Gradients, Relation, Slots
from ringjax.attention.kernels.tpu_visits import Cut
from ringjax.attention.scores import ScoreRule
from ringjax.attention.softmax import Partial

if TYPE_CHECKING:
    from ringjax.attention.kernels.tpu_program import Program, Starts

LANES = 128
# Of vector memory: what every TPU has, and what these kernels take where there is more.
LITTLE, ENOUGH = 16 * 2**20, 24 * 2**20
OLD = ("TPU v2", "TPU v3", "TPU v4")


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
      vmem: bytes of vector memory; see `of`.
      interpret: run step by step in plain jax, on any backend, with tiles of any size: for tests.

    Raises:
      ValueError: a tile is not a multiple of 128.
    """

    q_tile: int = 512
    k_tile: int = 1024
    rows: int = 2048
    vmem: int = LITTLE
    interpret: bool = False
    name = "tpu"

    def __post_init__(self) -> None:
        for name in ("q_tile", "k_tile"):
            tile = getattr(self, name)
            if tile < 1 or (tile % LANES and not self.interpret):
                raise ValueError(
                    f"TpuKernel.{name} must be a positive multiple of {LANES}, the width of a register; got {tile}"
                )

    @classmethod
    def of(cls, kind: str) -> "TpuKernel":
        """For TPUs of a kind, as jax calls it: those up to v4 have 16 MiB of vector memory, later ones 64 or more."""
        return cls(vmem=ENOUGH if kind.startswith("TPU") and not kind.startswith(OLD) else LITTLE)

    @property
    def apart(self) -> bool:
        return True

    @property
    def check_vma(self) -> bool:
        return not self.interpret  # jax's interpreter of kernels loses track

    def forward(self, q, kv, relation, rule, heads, before, q_slots, k_slots) -> Partial:
        q, kv = _supported(q), _supported(kv)
        program, starts = self._program(q, kv, relation, rule, q_slots, k_slots)
        if starts is not None:
            return program.forward(q, kv, heads, before, starts)
        part = Partial(*(q_slots.take(x, 3) for x in before))
        part = program.forward(q_slots.take(q, 3), k_slots.take(kv, 2), heads, part, (0, 0))
        return Partial(*(q_slots.put(x, new, 3) for x, new in zip(before, part, strict=True)))

    def backward(self, q, kv, relation, rule, heads, lse, delta, dout, before, q_slots, k_slots) -> Gradients:
        q, kv, dout = (_supported(x) for x in (q, kv, dout))
        program, starts = self._program(q, kv, relation, rule, q_slots, k_slots)
        if starts is not None:
            return program.backward(q, kv, heads, lse, delta, dout, before, starts)
        q, lse, delta, dout = (q_slots.take(x, 3) for x in (q, lse, delta, dout))
        some = Gradients(
            None if before.dq is None else q_slots.take(before.dq, 3),
            None if before.dkv is None else k_slots.take(before.dkv, 2),
        )
        some = program.backward(q, k_slots.take(kv, 2), heads, lse, delta, dout, some, (0, 0))
        return Gradients(
            None if before.dq is None else q_slots.put(before.dq, some.dq, 3),
            None if before.dkv is None else k_slots.put(before.dkv, some.dkv, 2),
        )

    def _program(
        self, q: jax.Array, kv: jax.Array, relation: Relation, rule: ScoreRule, q_slots: Slots, k_slots: Slots
    ) -> tuple["Program", "Starts | None"]:
        """What to run, and the tiles at which the slots begin; None if they are not made of tiles of the blocks."""
        from ringjax.attention.kernels.tpu_program import Program

        given = sum(x is not None for x in relation.k_tokens)
        q_tile, k_tile, heads = self._tiles(q, kv, rule, given, q_slots.size, k_slots.size)
        cut = Cut(relation, (q_slots.size, k_slots.size), (q_tile, k_tile))
        program = Program(cut, rule, heads, q.shape[-1], self.vmem, self.interpret)
        sides = ((q_slots, q_tile, q.shape[3]), (k_slots, k_tile, kv.shape[2]))
        if not all(slots.size == length or _divides(tile, slots) for slots, tile, length in sides):
            return program, None
        return program, (q_slots.start // q_tile, k_slots.start // k_tile)

    def _tiles(
        self, q: jax.Array, kv: jax.Array, rule: ScoreRule, given: int, q_len: int, k_len: int
    ) -> tuple[int, int, int]:
        """Queries of a tile, keys of a tile, and query heads that share a tile of keys, with `given` token arrays."""
        group, unit = q.shape[2], 1 if self.interpret else LANES
        q_most, k_most, rows = self.q_tile, self.k_tile, self.rows
        while True:
            q_tile, k_tile = _tile(q_len, q_most, unit), _tile(k_len, k_most, unit)
            most = min(group, max(1, rows // q_tile))
            heads = next(heads for heads in range(most, 0, -1) if group % heads == 0)
            dims = q.shape[-1], kv.shape[-1] - q.shape[-1]
            if _bytes(q_tile, k_tile, heads, *dims, q.dtype.itemsize, rule, given) <= self.vmem:
                return q_tile, k_tile, heads
            if k_tile > 256:
                k_most = _half(k_tile)
            elif heads > 1:
                rows = q_tile * (heads - 1)
            elif q_tile > LANES:
                q_most = _half(q_tile)
            else:
                return q_tile, k_tile, heads  # head dims in the thousands: the compiler has the last word


def _divides(tile: int, slots: Slots) -> bool:
    return slots.unit % tile == 0 and slots.size % tile == 0


def _bytes(
    q_tile: int, k_tile: int, heads: int, dim: int, value_dim: int, size: int, rule: ScoreRule, given: int
) -> int:
    """What a step needs, for numbers of `size` bytes: tiles, twice if they come or go meanwhile, and scores.

    Of scores and their kin about four in float32 are alive at a time, one more if scores are changed, and the pieces
    of float32 operands besides: as compiled, with the widths used here. What is given of each key is turned from a
    row of lanes into a column, which takes a tile of its own.
    """
    width, value_width, both = (-(-x // LANES) * LANES for x in (dim, value_dim, dim + value_dim))
    queries, keys, scores = heads * q_tile, k_tile * both, q_tile * k_tile
    forward = queries * (width * 2 * size + value_width * (4 * 4 + 4)) + keys * 2 * size
    of_queries = queries * (width * (2 * size + 4 * 4 + 4) + value_width * 2 * size) + keys * 2 * size
    of_keys = queries * (width + value_width) * 2 * size + keys * (2 * size + 4 * 4)
    changed = rule.softcap is not None or rule.needs_positions
    columns = given * k_tile * LANES * 4
    return max(forward, of_queries, of_keys) + scores * 4 * (2 + size + changed) + columns


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
