"""The interface of block attention: queries of one block against keys and values of one block."""

from abc import ABC, abstractmethod
from enum import Enum
from typing import NamedTuple

import jax

from ringjax.attention.mask import Mask, Tokens
from ringjax.attention.scores import Heads, ScoreRule
from ringjax.attention.softmax import Partial


class Order(Enum):
    """What is known, before any data is seen, of the positions of a query block and of a key block."""

    ALL = "all"  # positions hide nothing
    SLOTS = "slots"  # `Lead` says how the positions follow from the slots
    ANY = "any"  # the tokens say the positions


class Lead(NamedTuple):
    """How far a query is ahead of a key: query slot i minus key slot j is stride * (i - j) + by in positions.

    Attributes:
      stride: between neighbouring slots.
      by: may be traced.
      low: `by` is at least this, which is known beforehand.
      high: `by` is at most this.
    """

    stride: int = 1
    by: jax.Array | int = 0
    low: int = 0
    high: int = 0


class Relation(NamedTuple):
    """Which keys of a block the queries of a block see.

    Attributes:
      mask: applied to the positions, unless order is ALL.
      order: what is known beforehand.
      lead: for order SLOTS.
      q_tokens: of the Lq queries. Positions are given if order is ANY or if the scores depend on them. Segments, if
        given, hide what is in another document whatever the order says.
      k_tokens: of the Lk keys, likewise.
    """

    mask: Mask
    order: Order
    lead: Lead
    q_tokens: Tokens
    k_tokens: Tokens


class BlockKernel(ABC):
    """Attention of Lq queries over Lk keys on one device.

    Shapes: q [B, K, G, Lq, D], k [B, K, Lk, D], v [B, K, Lk, Dv]. Everything is accumulated in float32. A value that
    is not finite reaches no row that may not see it.
    """

    name: str

    @property
    def check_vma(self) -> bool:
        """Whether jax can keep track of what varies over mesh axes inside the kernel."""
        return True

    @abstractmethod
    def forward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        relation: Relation,
        rule: ScoreRule,
        heads: Heads,
        before: Partial,
    ) -> Partial:
        """Attention over these keys, merged with what has been seen before.

        The merge is the kernel's, which has the rows at hand: by itself it would read and write them once more, and
        that traffic, not the transfer between devices, is what a ring loses on fast links.

        Args:
          q: queries.
          k: keys.
          v: values.
          relation: what sees what.
          rule: what happens to the scores. Dropout acts on out, not on lse: what is dropped still counts in the
            softmax.
          heads: what differs between sequences and heads, [B, K, G].
          before: attention of the same queries over other keys.

        Returns:
          out [B, K, G, Lq, Dv] and lse [B, K, G, Lq], both float32.
        """

    @abstractmethod
    def backward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        relation: Relation,
        rule: ScoreRule,
        heads: Heads,
        lse: jax.Array,
        delta: jax.Array,
        dout: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Share of these keys in the gradients.

        With p = exp(s - lse): ds = p (keep / (1 - rate) dout . v - delta), dq = ds k, dk = ds^T q (through scale and
        softcap), dv = (p keep / (1 - rate))^T dout.

        Args:
          q: queries.
          k: keys.
          v: values.
          relation: what sees what.
          rule: what happens to the scores.
          heads: what differs between sequences and heads, [B, K, G].
          lse: [B, K, G, Lq], over all keys, also those of other blocks; -inf for rows that see none.
          delta: [B, K, G, Lq], rowsum(dout * out) - dlse, with the out over all keys.
          dout: [B, K, G, Lq, Dv].

        Returns:
          dq, dk, dv in float32, of the shapes of q, k, v.
        """
