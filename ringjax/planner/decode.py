"""When sharding the cache pays in decoding, and by how much.

One token's attention reads the whole cache: 2 K D b S bytes at W bytes/s. Shared out over R devices each reads its
part, and the partial results are combined by one reduction of an output and an lse for each head, which takes t_comb
and hardly depends on S. So it pays where

    S > t_comb W / (2 K D b (1 - 1 / R))

Passing partial results around a ring would take R - 1 messages one after the other, and never pays.
"""

from dataclasses import dataclass
from math import ceil, log2

from ringjax.planner.hardware import Chip, Link


@dataclass(frozen=True)
class Decode:
    """Attention of one new token in one layer.

    Attributes:
      ring: R, devices that share the cache.
      context: S, tokens in the cache.
      alone: seconds on one device that has all of it.
      shared: seconds on R devices.
      pays_from: tokens from which sharing is faster.
    """

    ring: int
    context: int
    alone: float
    shared: float
    pays_from: float

    @property
    def speedup(self) -> float:
        return self.alone / self.shared


def decode(
    chip: Chip,
    link: Link,
    ring: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rows: int = 1,
    cache_bytes: int = 2,
) -> Decode:
    """Predict it.

    Args:
      chip: of every device.
      link: between them.
      ring: R.
      context: S.
      heads: H on a device.
      kv_heads: K on a device.
      head_dim: D.
      rows: sequences that are decoded together.
      cache_bytes: b.
    """
    each = 2 * rows * kv_heads * head_dim * cache_bytes  # of a token in the cache
    combine = 0.0
    if ring > 1:
        result = rows * heads * (head_dim + 1) * 4
        combine = 2 * ceil(log2(ring)) * link.latency + 2 * result * (ring - 1) / ring / link.bandwidth
    alone = context * each / chip.memory_bandwidth
    saved = 1 - 1 / ring
    pays_from = combine * chip.memory_bandwidth / (each * saved) if ring > 1 else float("inf")
    return Decode(ring, context, alone, alone / ring + combine, pays_from)
