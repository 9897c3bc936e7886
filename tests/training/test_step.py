"""One step: the loss is the sum over all parts divided by the weight of all parts, and nothing else changes."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from ringjax.config import Config, ModelConfig, OptimConfig, TrainConfig
from ringjax.optim import build_optimizer
from ringjax.training.state import build_decoder, initial_state
from ringjax.training.step import loss_sum, make_train_step

BATCH, SEQ, VOCAB = 4, 32, 64
CONFIG = Config(
    model=ModelConfig(layers=1, dim=16, heads=2, kv_heads=1, head_dim=8, mlp_dim=24, loss_chunk=20),
    # With its usual eps, AdamW magnifies the rounding of gradients near 0.
    optim=OptimConfig(lr=0.01, warmup_steps=2, clip_norm=0.5, eps=0.01),
    train=TrainConfig(steps=10, remat="none"),
)


def make_batch(padded_rows=()) -> dict[str, jax.Array]:
    """Rows that count for very different amounts; some may be nothing but padding."""
    rng = np.random.default_rng(0)
    weights = rng.uniform(0, 1, (BATCH, SEQ)) * np.array([[1.0], [0.1], [3.0], [0.5]])
    batch = {
        "tokens": rng.integers(0, VOCAB, (BATCH, SEQ)),
        "targets": rng.integers(0, VOCAB, (BATCH, SEQ)),
        "weights": weights.astype(np.float32),
        "positions": np.tile(np.arange(SEQ), (BATCH, 1)),
        "segment_ids": np.zeros((BATCH, SEQ), np.int32),
    }
    for row in padded_rows:
        for name, value in (("tokens", 0), ("targets", 0), ("weights", 0), ("positions", 0), ("segment_ids", -1)):
            batch[name][row] = value
    return {name: jnp.asarray(leaf) for name, leaf in batch.items()}


@pytest.fixture(scope="module")
def model():
    """The optimizer, its schedule, the decoder's definition and a first state."""
    optimizer, schedule = build_optimizer(CONFIG.optim, CONFIG.train.steps)
    definition, _ = nnx.split(nnx.eval_shape(lambda: build_decoder(CONFIG, VOCAB)))
    return optimizer, schedule, definition, jax.jit(lambda: initial_state(CONFIG, VOCAB, optimizer))()


@pytest.fixture(scope="module")
def steps(model):
    """The compiled step for each number of parts."""
    optimizer, schedule, definition, _ = model
    return {parts: jax.jit(make_train_step(definition, optimizer, schedule, parts)) for parts in (1, 2, 4)}


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("padded_rows", [(), (1, 3), (0, 1, 2)], ids=["whole", "a part padded", "one row left"])
def test_parts_change_nothing(model, steps, parts, padded_rows):
    batch = make_batch(padded_rows)
    want = got = model[-1]
    for _ in range(3):
        want, expected = steps[1](want, batch)
        got, metrics = steps[parts](got, batch)
        chex.assert_trees_all_close(metrics, expected, rtol=1e-6)
    chex.assert_tree_all_finite(got)
    chex.assert_trees_all_close(got.params, want.params, rtol=1e-6, atol=1e-6)


def test_parts_drop_the_same_and_steps_do_not(model):
    optimizer, schedule, _, state = model
    config = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"attention_dropout": 0.3})})
    definition, _ = nnx.split(nnx.eval_shape(lambda: build_decoder(config, VOCAB)))
    one, two = (jax.jit(make_train_step(definition, optimizer, schedule, parts, seed=7)) for parts in (1, 2))
    batch = make_batch()
    want, expected = one(state, batch)
    got, metrics = two(state, batch)
    chex.assert_trees_all_close(metrics, expected, rtol=1e-6)
    chex.assert_trees_all_close(got.params, want.params, rtol=1e-6, atol=1e-6)
    _, later = one(replace(state, step=state.step + 1), batch)
    assert float(later["loss"]) != pytest.approx(float(expected["loss"]), rel=1e-4)
    # Nothing is dropped in an evaluation.
    evaluated = [
        jax.jit(partial(loss_sum, with_or_without))(state.params, batch) for with_or_without in (definition, model[2])
    ]
    np.testing.assert_array_equal(*evaluated)


def test_loss_and_gradient_are_sums_over_the_weight_of_the_whole_batch(model, steps):
    _, _, definition, state = model
    batch = make_batch(padded_rows=(2,))

    @jax.jit
    def one_row(params, row):
        return jax.value_and_grad(lambda params: loss_sum(definition, params, row), has_aux=True)(params)

    rows = [one_row(state.params, jax.tree.map(lambda x: x[i : i + 1], batch)) for i in range(BATCH)]  # noqa: B023
    weight = sum(float(row[0][1]) for row in rows)
    gradient = jax.tree.map(lambda *parts: sum(parts) / weight, *(row[1] for row in rows))
    assert weight == pytest.approx(float(batch["weights"].sum()))
    _, metrics = steps[2](state, batch)
    assert float(metrics["loss"]) == pytest.approx(sum(float(row[0][0]) for row in rows) / weight, rel=1e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-5)
    assert float(metrics["weight"]) == pytest.approx(weight)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_batch_of_padding_has_no_loss_and_no_nan(model, steps, parts):
    state, metrics = steps[parts](model[-1], make_batch(padded_rows=range(BATCH)))
    assert (float(metrics["loss"]), float(metrics["grad_norm"]), float(metrics["weight"])) == (0, 0, 0)
    chex.assert_tree_all_finite(state)


def test_the_step_is_pure_and_counts(model, steps):
    _, schedule, _, state = model
    before = jax.tree.map(np.array, state)
    first, metrics = steps[1](state, make_batch())
    again, same = steps[1](state, make_batch())
    chex.assert_trees_all_equal((first, metrics), (again, same))
    chex.assert_trees_all_equal(before, jax.tree.map(np.array, state))
    assert (int(state.step), int(first.step)) == (0, 1)
    second, later = steps[1](first, make_batch())
    assert (int(second.step), float(later["lr"])) == (2, pytest.approx(float(schedule(1))))
    assert float(metrics["lr"]) == pytest.approx(float(schedule(0)))
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), second.params, state.params)
    assert all(jax.tree.leaves(changed))
