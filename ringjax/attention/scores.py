"""What happens to scores between the product of queries and keys and the softmax, and to weights after it.

    u_ij = scale q_i . k_j
    s_ij = softcap tanh(u_ij / softcap) - slope_h |p_i - p_j|        (each part only if asked for)
    out_i = sum_j softmax_j(s_ij) keep_ij / (1 - rate) v_j

The bias is ALiBi (Press et al., arXiv:2108.12409) with distances taken from the positions p.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class ScoreRule:
    """The static part.

    Attributes:
      scale: multiplies the products.
      softcap: bound on the scores; None = none.
      dropout: share of the weights that is dropped.
      alibi: whether `Heads.slopes` is given.
    """

    scale: float
    softcap: float | None = None
    dropout: float = 0.0
    alibi: bool = False

    @property
    def needs_positions(self) -> bool:
        """Whether something besides the mask depends on positions."""
        return self.alibi or self.dropout > 0

    def cap(self, u: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Capped scores, and d capped / d u; None if that is 1."""
        if self.softcap is None:
            return u, None
        bounded = jnp.tanh(u / self.softcap)
        return self.softcap * bounded, 1 - bounded * bounded


class Heads(NamedTuple):
    """What differs between sequences and heads: [B, H] in the operator, [B, K, G] in kernels. None if not needed."""

    slopes: jax.Array | None = None  # float32, of ALiBi
    noise: jax.Array | None = None  # uint32, what dropout starts from


def alibi_bias(slopes: jax.Array, q_positions: jax.Array, k_positions: jax.Array) -> jax.Array:
    """-slope |p_q - p_k|, for arguments that broadcast."""
    # Positions far apart overflow int32, and their distance is right as an unsigned number.
    distance = (jnp.maximum(q_positions, k_positions) - jnp.minimum(q_positions, k_positions)).astype(jnp.uint32)
    return -slopes * distance.astype(jnp.float32)


def alibi_slopes(heads: int) -> np.ndarray:
    """The standard slopes of ALiBi, [heads] float32: 2^(-8 i / n), i = 1 ... n, for n heads a power of two.

    For other counts those of the next lower power of two, followed by every second of the next higher one
    (arXiv:2108.12409, section 3, and its published code).

    Example:
      >>> from ringjax.attention import alibi_slopes
      >>> alibi_slopes(4)
      array([0.25      , 0.0625    , 0.015625  , 0.00390625], dtype=float32)
    """
    if isinstance(heads, bool) or not isinstance(heads, int | np.integer) or heads < 1:
        raise ValueError(f"the number of heads must be an integer of at least 1, got {heads!r}")
    heads = int(heads)
    lower = 1 << (heads.bit_length() - 1)

    def geometric(count: int) -> np.ndarray:
        return 2.0 ** (-8.0 * np.arange(1, count + 1) / count)

    return np.concatenate([geometric(lower), geometric(2 * lower)[::2]])[:heads].astype(np.float32)


def head_noise(seed: jax.Array | int, sequences: jax.Array, heads: jax.Array) -> jax.Array:
    """What dropout starts from in each sequence and head, [B, H] uint32, from their global numbers."""
    seed, sequence, head = (jnp.asarray(x).astype(jnp.uint32) for x in (seed, sequences, heads))
    return _mix(_mix(_mix(seed) + sequence[:, None] * np.uint32(0x9E3779B1)) + head * np.uint32(0x85EBCA77))


def keep(noise: jax.Array, q_positions: jax.Array, k_positions: jax.Array, rate: float) -> jax.Array:
    """Which weights dropout keeps: a function of (seed, sequence, head) and the two positions alone.

    So the mask is the same on every mesh, layout and ring size, and in the backward pass. Arguments broadcast.
    """
    row = _mix(noise + q_positions.astype(jnp.uint32) * np.uint32(0xC2B2AE3D))
    bits = _mix(row ^ (k_positions.astype(jnp.uint32) * np.uint32(0x9E3779B1)))
    return bits >= np.uint32(min(round(rate * 2**32), 2**32 - 1))


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of 32-bit numbers after which every bit depends on every bit: MurmurHash3's finalizer."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
