"""Schedule, clipping and which parameters decay."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from ringjax.config import OptimConfig
from ringjax.optim import build_optimizer


def parameters(value):
    return nnx.State(
        {
            "norm": nnx.Param(jnp.full((2, 2, 3), value), dims=("rounds", "layers", "embed")),
            "matrix": nnx.Param(jnp.full((2, 2, 3, 4), value), dims=("rounds", "layers", "embed", "mlp")),
            "final_norm": nnx.Param(jnp.full((3,), value), dims=("embed",)),
            "embedding": nnx.Param(jnp.full((5, 3), value), dims=("vocab", "embed")),
        }
    )


def rates(schedule, steps) -> list[float]:
    return [float(schedule(step)) for step in steps]


def test_learning_rate_rises_peaks_and_ends_at_its_share():
    _, schedule = build_optimizer(OptimConfig(lr=1.0, warmup_steps=4, final_lr_ratio=0.1), steps=21)
    np.testing.assert_allclose(rates(schedule, range(5)), [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
    assert rates(schedule, [12, 20]) == pytest.approx([0.55, 0.1])  # half way down the cosine, and its end
    falling = rates(schedule, range(4, 21))
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 10), (10, 5), (5, 5)])
def test_short_runs_have_a_positive_finite_rate(warmup, steps):
    _, schedule = build_optimizer(OptimConfig(lr=1.0, warmup_steps=warmup), steps)
    assert all(0 < rate <= 1 for rate in rates(schedule, range(steps)))


def test_without_gradient_matrices_decay_and_norms_do_not():
    optimizer, _ = build_optimizer(OptimConfig(lr=0.5, warmup_steps=0, weight_decay=0.1), steps=10)
    params = parameters(2.0)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    moved: Any = optax.apply_updates(params, updates)
    for name in ("matrix", "embedding"):
        np.testing.assert_allclose(moved[name][...], 2.0 * (1 - 0.5 * 0.1), rtol=1e-6)
    for name in ("norm", "final_norm"):
        np.testing.assert_array_equal(moved[name][...], 2.0)


def test_a_step_is_adam_on_clipped_gradients():
    config = OptimConfig(lr=0.1, warmup_steps=0, weight_decay=0.0, clip_norm=1.0, eps=1e-2)
    optimizer, _ = build_optimizer(config, steps=10)
    params = parameters(1.0)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    updates, _ = optimizer.update(parameters(7.0), optimizer.init(params), params)
    clipped = 1 / np.sqrt(size)  # all gradients equal, global norm 1
    for update in jax.tree.leaves(updates):
        np.testing.assert_allclose(update, -0.1 * clipped / (clipped + 1e-2), rtol=1e-5)


def test_clipping_can_be_turned_off():
    config = OptimConfig(lr=0.1, warmup_steps=0, weight_decay=0.0, clip_norm=None, eps=1.0)
    optimizer, _ = build_optimizer(config, steps=10)
    params = parameters(1.0)
    updates: Any = optimizer.update(parameters(7.0), optimizer.init(params), params)[0]
    np.testing.assert_allclose(updates["norm"][...], -0.1 * 7 / (7 + 1), rtol=1e-5)
