"""The interface of block attention: queries of one block against keys and values of one block."""

from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, NamedTuple

import jax

from ringjax.attention.mask import Mask, Tokens
from ringjax.attention.scores import Heads, ScoreRule
from ringjax.attention.softmax import Partial


class KernelError(ValueError):
    """A kernel that was asked for by name cannot do what it is asked."""


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


class Slots(NamedTuple):
    """Slots of a block that a call is about.

    Attributes:
      start: the first one; may be traced.
      size: how many.
      unit: known beforehand: `start` is a multiple of it.
    """

    start: jax.Array | int
    size: int
    unit: int

    def take(self, x: jax.Array, dim: int) -> jax.Array:
        """These slots of x."""
        if x.shape[dim] == self.size:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self.start, self.size, axis=dim)

    def put(self, x: jax.Array, part: jax.Array, dim: int) -> jax.Array:
        """x with these slots replaced."""
        if x.shape[dim] == self.size:
            return part
        return jax.lax.dynamic_update_slice_in_dim(x, part, self.start, axis=dim)


def all_slots(length: int) -> Slots:
    """Those of a whole block."""
    return Slots(0, length, length)


class Gradients(NamedTuple):
    """Sums over some of the keys, in float32; None for what is not wanted."""

    dq: Any  # [B, K, G, Lq, D]
    dkv: Any  # [B, K, Lk, D + Dv]


class BlockKernel(ABC):
    """Attention of Lq queries over Lk keys on one device, or of some slots of both.

    Shapes: q [B, K, G, Lq, D]; kv [B, K, Lk, D + Dv], keys and values side by side, as they travel. Everything is
    accumulated in float32, into what the caller has: shares that others add would take memory of their own and be
    read and written once more, and that traffic, not the transfer between devices, is what a ring loses on fast
    links. For the same reason a kernel gets whole blocks and the slots to work on, not copies.

    A value that is not finite reaches no row that may not see it.
    """

    name: str

    @property
    def check_vma(self) -> bool:
        """Whether jax can keep track of what varies over mesh axes inside the kernel."""
        return True

    @property
    def apart(self) -> bool:
        """Whether dq and dkv are computed apart, so that either can be had alone at no more than its share."""
        return False

    @property
    def covers_hops(self) -> bool:
        """Whether a transfer can run under this kernel. Where none can, the ring does not prepare for it."""
        return True

    def refusal(self, q: jax.Array, kv: jax.Array, relation: Relation, rule: ScoreRule) -> str | None:
        """Why this kernel cannot do a call, None if it can.

        Args:
          q: queries, of which shape and dtype count.
          kv: keys and values, likewise.
          relation: what sees what.
          rule: what happens to the scores.
        """
        return None

    @abstractmethod
    def forward(
        self,
        q: jax.Array,
        kv: jax.Array,
        relation: Relation,
        rule: ScoreRule,
        heads: Heads,
        before: Partial,
        q_slots: Slots,
        k_slots: Slots,
    ) -> Partial:
        """Attention over these keys, merged with what has been seen before.

        Args:
          q: queries.
          kv: keys and values.
          relation: what sees what; its tokens are those of the slots.
          rule: what happens to the scores. Dropout acts on out, not on lse: what is dropped still counts in the
            softmax.
          heads: what differs between sequences and heads, [B, K, G].
          before: attention of the same queries over other keys.
          q_slots: of the queries.
          k_slots: of the keys.

        Returns:
          out [B, K, G, Lq, Dv] and lse [B, K, G, Lq], both float32; other slots are as before.
        """

    @abstractmethod
    def backward(
        self,
        q: jax.Array,
        kv: jax.Array,
        relation: Relation,
        rule: ScoreRule,
        heads: Heads,
        lse: jax.Array,
        delta: jax.Array,
        dout: jax.Array,
        before: Gradients,
        q_slots: Slots,
        k_slots: Slots,
    ) -> Gradients:
        """The gradients before, and added to them the share of these queries and keys.

        With p = exp(s - lse): ds = p (keep / (1 - rate) dout . v - delta), dq = ds k, dk = ds^T q (through scale and
        softcap), dv = (p keep / (1 - rate))^T dout.

        Args:
          q: queries.
          kv: keys and values.
          relation: what sees what; its tokens are those of the slots.
          rule: what happens to the scores.
          heads: what differs between sequences and heads, [B, K, G].
          lse: [B, K, G, Lq], over all keys, also those of other blocks; -inf for rows that see none.
          delta: [B, K, G, Lq], rowsum(dout * out) - dlse, with the out over all keys.
          dout: [B, K, G, Lq, Dv].
          before: sums so far; one of them may be None if the kernel computes them `apart`.
          q_slots: of the queries.
          k_slots: of the keys.

        Returns:
          Sums of the shapes of `before`; other slots are as before.
        """
