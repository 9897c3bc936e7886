"""The interface of block attention: queries of one block against keys and values of one block."""

from abc import ABC, abstractmethod
from enum import Enum
from typing import NamedTuple

import jax

from ringjax.attention.mask import Mask, Tokens
from ringjax.attention.softmax import Partial


class Order(Enum):
    """What is known, before any data is seen, of the slots of a query block and of a key block."""

    ALL = "all"  # positions hide nothing
    LOWER = "lower"  # query slot i sees key slot j when i >= j + shift, shift being 0 or 1
    ANY = "any"  # the positions decide


class Relation(NamedTuple):
    """Which keys of a block the queries of a block see.

    Attributes:
      mask: applied to the positions if order is ANY.
      order: what is known beforehand.
      shift: for order LOWER; may be traced.
      q_tokens: of the Lq queries; positions are given if order is ANY. Segments, if given, hide what is in another
        document whatever the order says.
      k_tokens: of the Lk keys, likewise.
    """

    mask: Mask
    order: Order
    shift: jax.Array | int
    q_tokens: Tokens
    k_tokens: Tokens


class BlockKernel(ABC):
    """Attention of Lq queries over Lk keys on one device.

    Shapes: q [B, K, G, Lq, D], k [B, K, Lk, D], v [B, K, Lk, Dv]. Scores are scale * q k^T. Everything is
    accumulated in float32.
    """

    name: str

    @abstractmethod
    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array, relation: Relation, scale: float) -> Partial:
        """Attention over these keys alone: out [B, K, G, Lq, Dv] and lse [B, K, G, Lq], both float32."""

    @abstractmethod
    def backward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        relation: Relation,
        scale: float,
        lse: jax.Array,
        delta: jax.Array,
        dout: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """These keys' share of the gradients.

        Args:
          q: as in `forward`, like k, v, relation and scale.
          k: see q.
          v: see q.
          relation: see q.
          scale: see q.
          lse: [B, K, G, Lq] float32, over *all* keys of the row, wherever they are.
          delta: [B, K, G, Lq] float32, rowsum(dout * out) - dlse, likewise over all keys.
          dout: [B, K, G, Lq, Dv].

        Returns:
          dq, dk, dv in float32, of the shapes of q, k, v.
        """
