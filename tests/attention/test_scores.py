"""Bias and dropout."""

import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.attention import alibi_slopes
from ringjax.attention.scores import alibi_bias, head_noise, keep


def test_slopes_of_powers_of_two_and_between():
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    between = alibi_slopes(6)
    np.testing.assert_allclose(between, [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
    with pytest.raises(ValueError, match="an integer of at least 1, got 0"):
        alibi_slopes(0)


def test_bias_falls_with_distance_on_both_sides():
    bias = alibi_bias(jnp.float32(0.5), jnp.array([[3]]), jnp.arange(6)[None])
    np.testing.assert_array_equal(bias, [[-1.5, -1.0, -0.5, 0.0, -0.5, -1.0]])


def kept(seed=0, batch=2, heads=2, rate=0.25, size=256):
    """[B, H, q, k]"""
    noise = head_noise(jnp.uint32(seed), jnp.arange(batch), jnp.arange(heads))[:, :, None, None]
    places = jnp.arange(size)
    return np.asarray(keep(noise, places[:, None], places, rate))


def test_the_share_that_is_dropped_is_the_rate():
    for rate in (0.1, 0.25, 0.9):
        x = kept(rate=rate)
        spread = np.sqrt(rate * (1 - rate) / x.size)
        assert abs((1 - x.mean()) - rate) < 4 * spread
        # In every row and column too.
        spread = np.sqrt(rate * (1 - rate) / 256)
        assert np.abs(x.mean(-1) - (1 - rate)).max() < 5 * spread
        assert np.abs(x.mean(-2) - (1 - rate)).max() < 5 * spread


def test_seeds_sequences_heads_rows_and_columns_are_independent():
    x = kept() - 0.75
    other = kept(seed=1) - 0.75
    pairs = [
        (x, other),
        (x[0], x[1]),
        (x[:, 0], x[:, 1]),
        (x[..., 1:, :], x[..., :-1, :]),
        (x[..., 1:], x[..., :-1]),
        (x[..., 1:, 1:], x[..., :-1, :-1]),
        (x, x.swapaxes(-1, -2)),
    ]
    for a, b in pairs:
        correlation = (a * b).mean() / 0.1875
        assert abs(correlation) < 4.5 / np.sqrt(a.size), correlation
