"""The ways in which keys can meet queries, by what they send and what one device then has.

This version of ringjax runs the ring. The others are predicted, so that advice can say where a ring is not the best
that could be done.
"""

from dataclasses import dataclass
from typing import Literal

from ringjax.planner.machine import Machine
from ringjax.planner.ring import GRADIENT_BYTES, Block
from ringjax.planner.sizes import Sizes


@dataclass(frozen=True)
class Strategy:
    """How keys meet queries.

    Attributes:
      name: "ring"; "all-gather" (every device gets all keys and values before it computes); "ulysses"
        (all-to-alls exchange the sequence for the heads, arXiv:2309.14509); "hybrid" (all-to-alls within groups, a
        ring of groups).
      degree: devices among which heads are exchanged.
    """

    name: Literal["ring", "all-gather", "ulysses", "hybrid"]
    degree: int = 1

    def __str__(self) -> str:
        return f"hybrid of {self.degree}" if self.name == "hybrid" else self.name

    @property
    def runs(self) -> bool:
        """Whether this version of ringjax has it."""
        return self.name == "ring"

    def ring(self, size: Sizes) -> int:
        """Devices, or groups of devices, around which keys travel."""
        return size.mesh["seq"] // self.degree

    def block(self, size: Sizes) -> Block:
        """What one device has of attention after the exchange."""
        n = self.degree
        return Block(size.tokens * n, size.heads // n, size.kv_heads // n, size.head_dim, size.wire, size.rows)

    def exchange_seconds(self, size: Sizes, machine: Machine, again: bool) -> float:
        """Of one layer of one microbatch, forward and backward, besides the hops; nothing of it hides.

        An all-gather brings K and V together forward and backward, and sums their gradients in float32. All-to-alls
        bring q, k, v to the heads and out back to the tokens, and their gradients the other way.

        Args:
          size: of the run.
          machine: where it runs.
          again: whether the backward pass runs attention again.
        """
        laps = 3 if again else 2
        keys = 2 * size.kv_heads * size.head_dim * size.tokens * size.rows
        if self.name == "all-gather":
            whole = keys * size.mesh["seq"]
            gathered = machine.collective_seconds("all-gather", ("seq",), size.mesh, whole * size.wire)
            summed = machine.collective_seconds("reduce-scatter", ("seq",), size.mesh, whole * GRADIENT_BYTES)
            return laps * gathered + summed
        if self.degree == 1:
            return 0.0
        moved = (keys + 2 * size.heads * size.head_dim * size.tokens * size.rows) * size.wire
        return laps * machine.all_to_all_seconds("seq", self.degree, size.mesh, moved)

    def extra_bytes(self, size: Sizes) -> int:
        """Memory of one layer's attention beyond the ring's."""
        keys = 2 * size.kv_heads * size.head_dim * size.tokens * size.rows
        if self.name == "all-gather":
            # All keys in place of two blocks, all gradients in place of two.
            return max(0, size.mesh["seq"] - 2) * keys * (size.wire + GRADIENT_BYTES)
        if self.degree == 1:
            return 0
        return (keys + 2 * size.heads * size.head_dim * size.tokens * size.rows) * size.wire


RING = Strategy("ring")


def strategies(size: Sizes) -> list[Strategy]:
    """All that are possible on a mesh."""
    ring = size.mesh["seq"]
    found = [RING]
    if ring == 1:
        return found
    found.append(Strategy("all-gather"))
    for degree in range(2, ring + 1):
        if ring % degree == 0 and size.kv_heads % degree == 0:
            found.append(Strategy("ulysses" if degree == ring else "hybrid", degree))
    return found
