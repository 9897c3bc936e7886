"""Masks, against the plain definition with Python integers."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringjax.attention import Mask
from ringjax.attention.mask import Tokens, may_meet, visible

MASKS = [
    Mask(),
    Mask(causal=False),
    Mask(window=1),
    Mask(window=4),
    Mask(causal=False, window=4),
    Mask(prefix_length=3),
    Mask(window=2, prefix_length=3),
    Mask(causal=False, window=2, prefix_length=0),
    Mask(window=2**31 - 1),
]
EXTREMES = [-(2**31), -(2**31) + 1, -5, 0, 1, 2, 3, 7, 2**31 - 2, 2**31 - 1]


def sees(mask: Mask, q: int, k: int) -> bool:
    """The definition."""
    far = float("inf") if mask.window is None else mask.window
    near = 0 <= q - k < far if mask.causal else abs(q - k) < far
    return near or (mask.prefix_length is not None and k < mask.prefix_length)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_positions_over_the_whole_range_of_int32(mask):
    positions = jnp.array(EXTREMES, jnp.int32)
    found = visible(mask, Tokens(positions[:, None]), Tokens(positions[None]))
    want = [[sees(mask, q, k) for k in EXTREMES] for q in EXTREMES]
    if mask.is_full:
        assert found is None
        assert np.all(want)
    else:
        np.testing.assert_array_equal(found, want)


def tiles(count: int, *values: list[int]) -> Tokens:
    """Positions and segments, cut into tiles of one row each."""
    return Tokens(*(jnp.array(x, jnp.int32).reshape(count, 1, -1) for x in values))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    mask=st.sampled_from(MASKS),
    q=st.lists(st.sampled_from(EXTREMES), min_size=6, max_size=6),
    k=st.lists(st.sampled_from(EXTREMES), min_size=6, max_size=6),
    segments=st.lists(st.integers(-2, 2), min_size=12, max_size=12),
)
def test_tiles_with_a_visible_pair_may_meet(mask, q, k, segments):
    q_tokens = tiles(3, q, segments[:6])
    k_tokens = tiles(2, k, segments[6:])
    meet = np.asarray(may_meet(mask, q_tokens, k_tokens))
    for i in range(3):
        for j in range(2):
            pairs = [
                sees(mask, q[2 * i + a], k[3 * j + b]) and segments[2 * i + a] == segments[6 + 3 * j + b] >= 0
                for a in range(2)
                for b in range(3)
            ]
            assert meet[i, j] or not any(pairs)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_the_simplest_mask_shows_the_same(mask, length):
    simple = mask.within(length)
    pairs = [(q, k) for q in range(length) for k in range(length)]
    assert [sees(simple, *pair) for pair in pairs] == [sees(mask, *pair) for pair in pairs]
    assert simple.window is None or simple.window < length
    assert simple.prefix_length is None or 0 < simple.prefix_length < length


def test_tiles_far_apart_do_not_meet():
    positions = jnp.arange(64, dtype=jnp.int32).reshape(8, 1, 8)
    for mask, width in ((Mask(window=8), 2), (Mask(causal=False, window=9), 3), (Mask(), 36 / 8)):
        meet = np.asarray(may_meet(mask, Tokens(positions), Tokens(positions)))
        assert meet.sum() <= width * 8
