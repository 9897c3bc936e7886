"""What one block costs in a ring, and from which size on its hop is hidden: arithmetic, no device.

Per device: c local tokens, H and K heads of D, g = H / K, b bytes of a key/value element on the wire, m = 1 for a
full and 1/2 for a balanced causal block pair, F FLOP/s, w bytes/s of a hop, W bytes/s of the memory.

    t_fwd = 4 m H D c^2 / F        bytes_fwd = 2 K D c b
    t_bwd = 10 m H D c^2 / F       bytes_bwd = 2 K D c (b + 4), since gradients travel in float32
    hidden where t >= latency + bytes / w
"""

import math
from dataclasses import dataclass

from ringjax.planner.hardware import Chip, Link

GRADIENT_BYTES = 4  # of a travelling dK or dV element
# Bytes of memory traffic for one element of the output when two partial results are merged: read and written once
# in float32 by a kernel that has the rows at hand; or read twice, written and read again by operations of their own.
MERGE_FUSED, MERGE_UNFUSED = 8, 24


@dataclass(frozen=True)
class Block:
    """Attention of one device's block of queries.

    Attributes:
      tokens: c, on one device.
      heads: H, on one device.
      kv_heads: K, on one device.
      head_dim: D.
      wire_bytes: b.
      rows: sequences that travel together.
    """

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    wire_bytes: int = 2
    rows: int = 1

    def flops(self, share: float, backward: bool, keys: int | None = None) -> float:
        """Executed FLOPs against a block of `keys` (None = as many) of which a share is visible.

        The backward pass makes the scores again: five products to the forward pass's two.
        """
        products = 10 if backward else 4
        pairs = share * self.tokens * (self.tokens if keys is None else keys)
        return products * self.rows * self.heads * self.head_dim * pairs

    def hop_bytes(self, backward: bool = False) -> int:
        """Of keys and values; backward with their gradients behind them."""
        elements = 2 * self.rows * self.kv_heads * self.head_dim * self.tokens
        return elements * (self.wire_bytes + (GRADIENT_BYTES if backward else 0))

    def merge_bytes(self, fused: bool) -> int:
        """Memory traffic of one merge."""
        return (MERGE_FUSED if fused else MERGE_UNFUSED) * self.rows * self.heads * self.head_dim * self.tokens


def break_even_tokens(
    rate: float,
    bandwidth: float,
    group: float,
    share: float = 0.5,
    backward: bool = False,
    wire_bytes: int = 2,
    latency: float = 0.0,
    heads: int | None = None,
    head_dim: int | None = None,
) -> float:
    """Local tokens c from which a hop is hidden under the attention of its step.

        c_fwd = b F / (2 m g w)        c_bwd = (b + 4) F / (5 m g w)

    Args:
      rate: F.
      bandwidth: w.
      group: g.
      share: m.
      backward: which of the two.
      wire_bytes: b.
      latency: seconds of a message; needs heads and head_dim, which otherwise cancel out.
      heads: H on a device.
      head_dim: D.
    """
    size = wire_bytes + (GRADIENT_BYTES if backward else 0)
    linear = size * rate / ((5 if backward else 2) * share * group * bandwidth)
    if not latency:
        return linear
    assert heads, "latency counts against the work of all heads"
    assert head_dim, "latency counts against the work of a whole head"
    # a c^2 >= latency + l a c, with a c^2 the time of a step and l what the hop alone asks for
    per_pair = (10 if backward else 4) * share * heads * head_dim / rate
    return (linear + math.sqrt(linear**2 + 4 * latency / per_pair)) / 2


def gather_wins_from(chip: Chip, link: Link, fused: bool) -> float:
    """Query heads to a key/value head from which an all-gather that hides under nothing costs less than the merges of
    a ring whose hops all hide: g > 4 W / (k w), k bytes of a merge."""
    return 4 * chip.memory_bandwidth / ((MERGE_FUSED if fused else MERGE_UNFUSED) * link.bandwidth)
