"""flax.nnx.MultiHeadAttention on the ring."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ringjax.attention import Mask, attention_fn


def layers(mesh, dropout_rate=0.0, **options):
    """The same layer with flax's own attention and with the ring."""

    def make(**more):
        return nnx.MultiHeadAttention(
            4, 16, decode=False, rngs=nnx.Rngs(0), dropout_rate=dropout_rate, broadcast_dropout=False, **more
        )

    return make(), make(attention_fn=attention_fn(mesh=mesh, **options))


@pytest.mark.parametrize("causal", [True, False])
def test_equals_flaxs_own_attention(mesh_of, causal):
    flaxs, ours = layers(mesh_of(4))
    x = jax.random.normal(jax.random.key(0), (2, 24, 16))

    def loss(layer, x):
        return (layer(x, is_causal=causal) ** 2).sum()

    for a, b in zip(*(jax.tree.leaves(nnx.grad(loss)(layer, x)) for layer in (flaxs, ours)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours(x, is_causal=causal), flaxs(x, is_causal=causal), rtol=1e-5, atol=1e-6)


def test_cross_attention_and_more_batch_dims(mesh_of):
    flaxs, ours = layers(mesh_of(4))
    x = jax.random.normal(jax.random.key(0), (2, 3, 24, 16))
    y = jax.random.normal(jax.random.key(1), (2, 3, 10, 16))
    np.testing.assert_allclose(ours(x, y), flaxs(x, y), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours(x[0, 0]), flaxs(x[0, 0]), rtol=1e-5, atol=1e-6)


def test_the_modules_dropout_is_the_rings(mesh_of):
    _, ours = layers(mesh_of(4), dropout_rate=0.5)
    x = jnp.ones((2, 8, 16)) * jnp.arange(8.0)[:, None]
    outs = [ours(x, deterministic=False, rngs=nnx.Rngs(seed)) for seed in (0, 1, 0)]
    assert not np.allclose(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])
    assert not np.allclose(outs[0], ours(x, deterministic=True))


def test_what_a_ring_cannot_do_is_refused(mesh_of):
    x = jnp.ones((1, 8, 16))
    _, ours = layers(mesh_of(4))
    with pytest.raises(ValueError, match="say what is visible with attention_fn"):
        ours(x, mask=jnp.ones((1, 4, 8, 8), bool))
    with pytest.raises(ValueError, match="sow_weights=True needs"):
        ours(x, sow_weights=True)
    _, full = layers(mesh_of(4), mask=Mask(causal=False))
    with pytest.raises(ValueError, match="called with is_causal=True, and attention_fn has mask=Mask"):
        full(x, is_causal=True)
    with pytest.raises(ValueError, match="dropout_rate cannot be set here: the module decides"):
        attention_fn(dropout_rate=0.1)
    with pytest.raises(ValueError, match=r"ring_attention has no option windw; it has .*mask"):
        attention_fn(windw=3)
    with pytest.raises(ValueError, match="ring_attention_shard has no option mesh"):
        attention_fn(mesh=mesh_of(4), inside_shard_map=True)
    with pytest.raises(ValueError, match="query, key and value must be arrays; got list"):
        attention_fn(mesh=mesh_of(4))([1], x, x)
    shared = nnx.MultiHeadAttention(
        4, 16, decode=False, rngs=nnx.Rngs(0), dropout_rate=0.5, attention_fn=attention_fn(mesh=mesh_of(4))
    )
    with pytest.raises(ValueError, match="broadcast_dropout=False"):
        shared(x, deterministic=False, rngs=nnx.Rngs(0))
