"""One lap of the ring, device by device: when it computes, what travels meanwhile, and when it waits.

A device sends its block on as soon as it has it, before the attention of the step, and needs the next block after
it. In the backward pass the gradient of a block follows one step behind its keys. All devices begin together; what
the ring adds to a layer is the time until the last one is done, and what it wastes is what they wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ringjax.planner.hardware import Chip, Link
from ringjax.planner.pairs import pairs_of_steps
from ringjax.planner.ring import Block

MOST_RANKS = 64  # larger rings are played with so many ranks, each for some of them


@dataclass(frozen=True)
class Lap:
    """One lap, forward or backward; seconds, [ranks, steps] each.

    Step 0 is the own block; in the backward pass of a ring one half of it, and the other half is the last step.

    Attributes:
      start: when the attention of a step begins, since the start of the lap.
      compute: attention.
      merge: of the partial results, or of the gradients; its traffic in memory.
      waited: before the step, for its block. Exposed.
      hop: seconds of one message: keys and values, backward with gradients, as most of them have. In large rings a
        rank of the timeline stands for several, and a step for as many hops.
      without_hops: seconds of the lap if messages took no time: what remains is work, and waiting for busier devices.
    """

    start: np.ndarray
    compute: np.ndarray
    merge: np.ndarray
    waited: np.ndarray
    hop: float
    without_hops: float

    @property
    def seconds(self) -> float:
        """Until the last device is done."""
        return float((self.start + self.compute + self.merge)[:, -1].max())

    @property
    def exposed(self) -> float:
        """What messages add to the lap, seconds."""
        return self.seconds - self.without_hops

    @property
    def efficiency(self) -> float:
        """Attention of the mean device over the time of the lap: 1 where nobody waits and nothing is merged."""
        return float(self.compute.sum(axis=1).mean()) / self.seconds if self.seconds else 1.0

    @property
    def imbalance(self) -> float:
        """Attention of the busiest device over that of the mean one."""
        work = self.compute.sum(axis=1)
        return float(work.max() / work.mean()) if work.mean() else 1.0


@dataclass(frozen=True)
class Attention:
    """Attention of one layer on a ring.

    Attributes:
      layout: where tokens sit.
      ring: R.
      block: of one device.
      documents: tokens of each document of a row; None = one.
      window: tokens that one sees; None = all.
      precision: train.precision.
      fused: whether the kernel merges.
    """

    layout: str
    ring: int
    block: Block
    documents: tuple[int, ...] | None
    window: int | None
    precision: str
    fused: bool

    def laps(self, chip: Chip, link: Link | None) -> tuple[Lap, Lap]:
        """Forward and backward; without a link all keys are there, and a lap is one step."""
        return _laps(self, chip, link)

    def pairs(self) -> tuple[np.ndarray, int]:
        """Visible pairs of a head, [ranks, steps], and how many real ranks, and real steps, each stands for."""
        folds = range(-(-self.ring // MOST_RANKS), self.ring // (MOST_RANKS // 4) + 1)
        fold = next((n for n in folds if self.ring % n == 0), 1)
        length = self.block.tokens * fold
        return _pairs(self.layout, self.ring // fold, length, self.documents, self.window) / fold, fold

    def lap(self, pairs: np.ndarray, fold: int, chip: Chip, link: Link | None, backward: bool) -> Lap:
        """One lap, from `pairs()`."""
        if link is None:
            pairs = pairs.sum(axis=1, keepdims=True)
        block = self.block
        flops = block.flops(1.0, backward, keys=1) / block.tokens  # of one pair
        compute = pairs * (flops / chip.attention(self.precision, backward))
        merge = np.full_like(compute, fold * block.merge_bytes(self.fused) / chip.memory_bandwidth)
        merge[:, 0] = 0.0  # nothing to merge with
        hops, hop = np.zeros(0), 0.0
        if link is not None and pairs.shape[1] > 1:
            keys, both = (fold * (link.latency + block.hop_bytes(way) / link.bandwidth) for way in (False, True))
            hop = both if backward else keys
            hops = np.full(pairs.shape[1] - 1, hop)
            if backward:
                # The own block comes in two halves: the first hop, of keys alone, runs under one of them, and the
                # last hop, of gradients alone, under the other.
                half = compute[:, :1] / 2
                compute = np.concatenate([half, compute[:, 1:], half], axis=1)
                merge = np.concatenate([merge, merge[:, :1]], axis=1)
                hops = np.append(hops, both - keys + fold * link.latency)
                hops[0] = keys
        start, waited = _run(compute, merge, hops)
        ideal = float((_run(compute, merge, 0 * hops)[0] + compute + merge)[:, -1].max())
        return Lap(start, compute, merge, waited, hop, ideal)


# Rankings of meshes ask for the same laps, and for the same pairs with other heads, again and again.
_pairs = lru_cache(maxsize=256)(pairs_of_steps)


@lru_cache(maxsize=4096)
def _laps(attention: Attention, chip: Chip, link: Link | None) -> tuple[Lap, Lap]:
    """Forward and backward."""
    pairs, fold = attention.pairs()
    return attention.lap(pairs, fold, chip, link, False), attention.lap(pairs, fold, chip, link, True)


def _run(compute: np.ndarray, merge: np.ndarray, hops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Play the steps: when each begins, and what was waited before."""
    ranks, steps = compute.shape
    start, waited = np.zeros_like(compute), np.zeros_like(compute)
    done = compute[:, 0] + merge[:, 0]
    sent = np.zeros(ranks)  # when a device sent on what the next one needs now
    for step in range(1, steps):
        start[:, step] = np.maximum(done, np.roll(sent, 1) + hops[step - 1])
        waited[:, step] = start[:, step] - done
        sent = start[:, step]
        done = start[:, step] + compute[:, step] + merge[:, step]
    return start, waited


def documents_of(lengths: Sequence[int], row: int) -> tuple[int, ...]:
    """Documents of these lengths packed into one row, again and again until it is full; the last one may be cut."""
    found, left, at = [], row, 0
    while left:
        found.append(min(lengths[at % len(lengths)], left))
        left -= found[-1]
        at += 1
    return tuple(found)
