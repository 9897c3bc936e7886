"""What may attend to what, evaluated on positions and segments."""

from dataclasses import dataclass
from typing import NamedTuple

import jax


@dataclass(frozen=True)
class Mask:
    """Which keys a query may see, by global position.

    Attributes:
      causal: a token sees itself and what comes before it; False lets every token see every token.
      window: a token sees itself and the `window - 1` tokens before it (|q - k| < window if not causal). Not
        supported by `ring_attention` yet.
      prefix_length: keys at positions below it are visible to every query. Not supported by `ring_attention` yet.

    Example:
      >>> from ringjax.attention import Mask
      >>> Mask(causal=False)
      Mask(causal=False, window=None, prefix_length=None)
    """

    causal: bool = True
    window: int | None = None
    prefix_length: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether positions hide nothing."""
        return not self.causal and self.window is None


class Tokens(NamedTuple):
    """What masks know of a run of L tokens. None where the mask does not need it."""

    positions: jax.Array | None = None  # [B, L] or [1, L] int32
    segments: jax.Array | None = None  # [B, L] int32, negative = padding


def visible(mask: Mask, q: Tokens, k: Tokens) -> jax.Array | None:
    """Which of the keys each query may see.

    Args:
      mask: applied to the positions, if given.
      q: the queries' tokens, Lq of them.
      k: the keys' tokens, Lk of them.

    Returns:
      [B or 1, Lq, Lk] bool, or None when everything is visible. A token of a negative segment sees nothing and is
      not seen.
    """
    seen = None
    if q.positions is not None and k.positions is not None and mask.causal:
        seen = q.positions[:, :, None] >= k.positions[:, None, :]
    if q.segments is not None and k.segments is not None:
        same = (q.segments[:, :, None] == k.segments[:, None, :]) & (k.segments[:, None, :] >= 0)
        seen = same if seen is None else seen & same
    return seen


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
    if q.positions is not None and k.positions is not None and mask.causal:
        meet = q.positions.max(-1)[:, None] >= k.positions.min(-1)[None, :]
    if q.segments is not None and k.segments is not None:
        q_low, q_high = q.segments.min(-1)[:, None], q.segments.max(-1)[:, None]
        k_low, k_high = k.segments.min(-1)[None, :], k.segments.max(-1)[None, :]
        overlap = (q_high >= k_low) & (k_high >= q_low) & (q_high >= 0) & (k_high >= 0)
        meet = overlap if meet is None else meet & overlap
    return None if meet is None else meet.any(-1)
