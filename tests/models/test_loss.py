"""The chunked loss: exact for every chunk size, and it never holds all logits."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.models import token_loss_sum

B, S, M, V = 2, 64, 16, 96


def head(weight) -> Any:
    """All that the loss needs of a decoder."""
    return SimpleNamespace(head_weight=lambda: weight)


def dense(weight, hidden, targets, weights):
    logits = jnp.einsum("bsm,mv->bsv", hidden, weight, preferred_element_type=jnp.float32)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
    return (losses * weights).sum()


def chunked(weight, hidden, targets, weights, chunk=8):
    return token_loss_sum(head(weight), hidden, targets, weights, chunk)[0]


@pytest.fixture
def inputs():
    rng = np.random.default_rng(0)
    weights = rng.uniform(0, 2, (B, S)) * (rng.random((B, S)) < 0.7)
    return [
        jnp.asarray(rng.normal(size=(M, V)), jnp.float32),
        jnp.asarray(rng.normal(size=(B, S, M)), jnp.float32),
        jnp.asarray(rng.integers(0, V, (B, S))),
        jnp.asarray(weights, jnp.float32),
    ]


@pytest.mark.parametrize("chunk", [1, 8, 13, 128, 1000])
def test_sum_and_gradients_equal_the_dense_loss(inputs, chunk):
    got, gradients = jax.value_and_grad(partial(chunked, chunk=chunk), (0, 1, 3))(*inputs)
    want, expected = jax.value_and_grad(dense, (0, 1, 3))(*inputs)
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    for a, b in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    weight, hidden, targets, weights = inputs
    total = token_loss_sum(head(weight), hidden, targets, weights, chunk)[1]
    assert float(total) == pytest.approx(float(weights.sum()))


def test_no_weight_no_gradient_and_no_nan(inputs):
    weight, hidden, targets, weights = inputs
    value, gradients = jax.value_and_grad(chunked, (0, 1))(weight, 1e4 * hidden, targets, 0 * weights)
    assert float(value) == 0
    assert all((np.asarray(g) == 0).all() for g in gradients)


def test_bfloat16_sums_in_float32(inputs):
    low = [x.astype(jnp.bfloat16) for x in inputs[:2]]
    got, gradients = jax.value_and_grad(chunked, (0, 1))(*low, *inputs[2:])
    want, expected = jax.value_and_grad(dense, (0, 1))(*(x.astype(jnp.float32) for x in low), *inputs[2:])
    assert float(got) == pytest.approx(float(want), rel=1e-5)
    for g, e in zip(gradients, expected, strict=True):
        assert g.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(g, np.float32), e, rtol=2e-2, atol=2e-2 * float(jnp.abs(e).max()))


def largest_with_vocabulary(f, inputs) -> int:
    """Elements of the largest array with a dim V in the compiled gradient of f."""
    text = jax.jit(jax.grad(f, (0, 1))).lower(*inputs).compile().as_text()
    assert text
    shapes = [[int(n) for n in sizes.split(",")] for sizes in re.findall(r"\w+\[([\d,]+)\]", text)]
    return max(int(np.prod(shape)) for shape in shapes if V in shape)


def test_logits_of_all_tokens_never_exist(inputs):
    assert largest_with_vocabulary(dense, inputs) >= B * S * V
    assert largest_with_vocabulary(chunked, inputs) <= max(M, 8) * V
