"""RoPE, RMSNorm and SwiGLU against plain numpy, and what they promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ringjax.models.layers import RMSNorm, SwiGLU, normal_param
from ringjax.models.rope import rotary_angles, rotate

THETA = 100.0


def numpy_rope(x, positions):
    """One pair at a time, in float64."""
    out = np.array(x, np.float64)
    half = x.shape[-1] // 2
    for i in range(half):
        angle = (positions * THETA ** (-2 * i / x.shape[-1]))[..., None]
        a, b = np.float64(x[..., i]), np.float64(x[..., i + half])
        out[..., i], out[..., i + half] = (
            a * np.cos(angle) - b * np.sin(angle),
            b * np.cos(angle) + a * np.sin(angle),
        )
    return out


def test_rope_matches_numpy_at_positions_in_any_order():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 16, 3, 8)).astype(np.float32)
    positions = np.stack([rng.permutation(16), rng.integers(0, 5000, 16)]).astype(np.int32)
    rotated = rotate(jnp.asarray(x), *rotary_angles(jnp.asarray(positions), 8, THETA))
    np.testing.assert_allclose(rotated, numpy_rope(x, positions), atol=2e-3)  # float32 angles up to 5000 radians
    np.testing.assert_allclose(rotated[0], numpy_rope(x, positions)[0], atol=1e-5)


def test_scores_depend_on_distance_only():
    q, k = np.random.default_rng(1).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def score(q_position, k_position):
        at = [rotary_angles(jnp.array([[p]]), 8, THETA) for p in (q_position, k_position)]
        return float(jnp.sum(rotate(jnp.asarray(q), *at[0]) * rotate(jnp.asarray(k), *at[1])))

    assert score(7, 3) == pytest.approx(score(107, 103), rel=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-2


def test_rmsnorm_matches_numpy_and_is_float32_inside():
    norm = RMSNorm(8, eps=1e-3)
    norm.scale[...] = jnp.arange(8.0)
    x = np.random.default_rng(2).normal(size=(2, 4, 8)) * 100
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * np.arange(8)
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5, atol=1e-5)
    assert norm(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16
    tiny = norm(jnp.full((1, 1, 8), 1e-30, jnp.bfloat16))  # the square is no bfloat16 or float32
    assert np.isfinite(np.asarray(tiny, np.float32)).all()


def test_swiglu_matches_numpy():
    mlp = SwiGLU(8, 12, 1.0, jnp.dtype(jnp.float32), nnx.Rngs(0))
    x = np.random.default_rng(3).normal(size=(1, 4, 8)).astype(np.float32)
    gate, up = x @ np.asarray(mlp.gate[...]), x @ np.asarray(mlp.up[...])
    np.testing.assert_allclose(
        mlp(jnp.asarray(x)), (gate / (1 + np.exp(-gate)) * up) @ np.asarray(mlp.down[...]), atol=1e-5
    )


def test_initial_weights_have_the_deviation_asked_for_and_no_outliers():
    weight = normal_param(nnx.Rngs(0), (200, 200), ("embed", "mlp"), 0.5)[...]
    assert float(jnp.std(weight)) == pytest.approx(0.5, rel=0.02)
    assert float(jnp.abs(weight).max()) < 0.5 * 2 / 0.8796
    assert jax.tree.leaves(weight)[0].dtype == jnp.float32
