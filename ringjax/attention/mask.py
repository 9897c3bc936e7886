"""What may attend to what, evaluated on positions and segments."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

AnyArray = jax.Array | np.ndarray

# Differences of int32 positions, as the far end of an interval without one.
UNBOUNDED = 2**32


@dataclass(frozen=True)
class Mask:
    """Which keys a query may see, by global position.

    Attributes:
      causal: a token sees itself and what comes before it; False lets every token see every token.
      window: W, a token sees itself and the W - 1 tokens before it; if not causal, also the W - 1 after it
        (|q - k| < W). None = no limit.
      prefix_length: keys at positions below it are visible to every query, whatever causal and window say
        (prefix-LM); segments still hold. None = no prefix.

    Raises:
      ValueError: window is less than 1, or prefix_length negative, or either no integer.

    Example:
      >>> from ringjax.attention import Mask
      >>> Mask(causal=False)
      Mask(causal=False, window=None, prefix_length=None)
    """

    causal: bool = True
    window: int | None = None
    prefix_length: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool | np.bool_):
            raise ValueError(f"Mask.causal must be True or False, got {self.causal!r}")
        for name, least in (("window", 1), ("prefix_length", 0)):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value < 2**31:
                raise ValueError(
                    f"Mask.{name} must be None or an integer of at least {least} that fits into int32, known when "
                    f"the program is built (static); got {value!r}"
                )

    @property
    def is_full(self) -> bool:
        """Whether positions hide nothing."""
        return not self.causal and self.window is None

    @property
    def has_prefix(self) -> bool:
        """Whether some keys are visible by their position alone, however far from the query."""
        return self.prefix_length is not None and not self.is_full

    def within(self, length: int) -> "Mask":
        """The simplest mask that shows the same of positions 0 ... length - 1."""
        window = None if self.window is not None and self.window >= length else self.window
        prefix = self.prefix_length or None
        if prefix is not None and prefix >= length:
            return Mask(causal=False)
        return Mask(self.causal, window, prefix)

    @property
    def differences(self) -> tuple[int, int]:
        """The interval of query position minus key position that is visible; a prefix comes on top of it."""
        high = UNBOUNDED if self.window is None else self.window - 1
        return (0 if self.causal else -high), high


class Tokens(NamedTuple):
    """What masks know of a run of L tokens. None where the mask does not need it."""

    positions: jax.Array | None = None  # [B, L] or [1, L] int32
    segments: jax.Array | None = None  # [B, L] int32, negative = padding


def visible(mask: Mask, q: Tokens, k: Tokens) -> jax.Array | None:
    """Which of the keys each query may see.

    Args:
      mask: applied to the positions, if given.
      q: the queries' tokens, in a shape that broadcasts against that of the keys, as [B, Lq, 1].
      k: the keys' tokens, as [B, 1, Lk].

    Returns:
      A bool array of the broadcast shape, or None when everything is visible. A token of a negative segment sees
      nothing and is not seen.
    """
    seen = None
    if q.positions is not None and k.positions is not None and not mask.is_full:
        seen = _near(mask, q.positions, k.positions)
        if mask.prefix_length is not None:
            seen = seen | (k.positions < mask.prefix_length)
    if q.segments is not None and k.segments is not None:
        same = (q.segments == k.segments) & (k.segments >= 0)
        seen = same if seen is None else seen & same
    return seen


def _near(mask: Mask, q: jax.Array, k: jax.Array) -> jax.Array:
    """Whether the difference of positions is visible, without computing it where int32 could not hold it."""
    after, window = q >= k, mask.window
    if window is None:
        return after
    # The difference wraps around int32 only for tokens on the wrong side of each other, or absurdly far apart: as
    # an unsigned number it is right for every pair with q >= k.
    within = (q - k).astype(np.uint32) < window
    if mask.causal:
        return after & within
    return (after & within) | (~after & ((k - q).astype(np.uint32) < window))


def may_meet(mask: Mask, q: Tokens, k: Tokens) -> jax.Array | None:
    """Which pairs of tiles can hold a visible pair of tokens, judged by the ranges of positions and segments.

    Args:
      mask: as in `visible`.
      q: the queries, with tokens of shape [tiles of queries, B or 1, tokens of a tile].
      k: the keys, likewise.

    Returns:
      [tiles of queries, tiles of keys] bool; False is certain, True may be in vain. None if nothing can be said.
    """
    meet = None
    if q.positions is not None and k.positions is not None and not mask.is_full:
        (q_low, q_high), (k_low, k_high) = _ranges(q.positions, k.positions)
        meet = q_high >= k_low if mask.causal else None
        if mask.window is not None:
            # The nearest pair is q_low - k_high apart, if they do not overlap.
            near = (q_low <= k_high) | ((q_low - k_high).astype(np.uint32) < mask.window)
            if not mask.causal:
                near &= (k_low <= q_high) | ((k_low - q_high).astype(np.uint32) < mask.window)
            meet = near if meet is None else meet & near
        if mask.prefix_length is not None:
            assert meet is not None, "a mask that is not full is causal or has a window"
            meet = meet | (k_low < mask.prefix_length)
    if q.segments is not None and k.segments is not None:
        (q_low, q_high), (k_low, k_high) = _ranges(q.segments, k.segments)
        overlap = (q_high >= k_low) & (k_high >= q_low) & (q_high >= 0) & (k_high >= 0)
        meet = overlap if meet is None else meet & overlap
    return None if meet is None else meet.any(-1)


def must_meet(mask: Mask, q: Tokens, k: Tokens) -> jax.Array | None:
    """Which pairs of tiles hold visible pairs of tokens only, judged by the ranges of positions and segments.

    Args:
      mask: as in `visible`.
      q: the queries, with tokens of shape [tiles of queries, B or 1, tokens of a tile].
      k: the keys, likewise.

    Returns:
      [tiles of queries, tiles of keys] bool; True is certain, False may be in vain. None if nothing is hidden.
    """
    meet = None
    if q.positions is not None and k.positions is not None and not mask.is_full:
        (q_low, q_high), (k_low, k_high) = _ranges(q.positions, k.positions)
        meet = q_low >= k_high if mask.causal else None
        if mask.window is not None:
            near = (q_high <= k_low) | ((q_high - k_low).astype(np.uint32) < mask.window)
            if not mask.causal:
                near &= (k_high <= q_low) | ((k_high - q_low).astype(np.uint32) < mask.window)
            meet = near if meet is None else meet & near
        if mask.prefix_length is not None:
            assert meet is not None, "a mask that is not full is causal or has a window"
            meet = meet | (k_high < mask.prefix_length)
    if q.segments is not None and k.segments is not None:
        (q_low, q_high), (k_low, k_high) = _ranges(q.segments, k.segments)
        same = (q_low == k_high) & (q_high == k_low) & (q_low == q_high) & (q_low >= 0)
        meet = same if meet is None else meet & same
    return None if meet is None else meet.all(-1)


def _ranges(q: jax.Array, k: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Lowest and highest of each tile, [q tiles, 1, B or 1] and [1, k tiles, B or 1]."""
    return (q.min(-1)[:, None], q.max(-1)[:, None]), (k.min(-1)[None], k.max(-1)[None])
