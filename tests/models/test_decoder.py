"""The decoder on one device: against a naive one, and what may influence what."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hlo import trips
from jax import nn

from ringjax.config import AttentionConfig, ModelConfig
from ringjax.models import Decoder, count_parameters


def naive_logits(state: nnx.State, config: ModelConfig, batch) -> jax.Array:
    """The same mathematics with one layer after the other, dense masked attention and repeated key/value heads."""

    def norm(x, scale):
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + config.norm_eps) * scale

    def rope(x):
        half = config.head_dim // 2
        inverse = config.rope_theta ** (-2 * np.arange(half) / config.head_dim)
        turn = jnp.exp(1j * (batch["positions"][..., None] * inverse))[:, :, None]
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return jnp.concatenate([turned.real, turned.imag], -1)

    segments = batch["segment_ids"]
    visible = (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] >= 0)
    visible &= np.tri(segments.shape[1], dtype=bool)
    places = np.arange(segments.shape[1])
    behind = places[:, None] - places
    weights: Any = nnx.to_pure_dict(state)
    embedding = weights["embedding"]
    x = embedding[batch["tokens"]]
    for n in range(config.layers):
        layer = jax.tree.map(lambda p, n=n: p[0, n], weights["blocks"])
        attention, mlp = layer["attention"], layer["mlp"]
        y = norm(x, layer["attention_norm"]["scale"])
        q = rope(jnp.einsum("bsm,mhd->bshd", y, attention["q"]))
        k, v = rope(jnp.einsum("bsm,mhd->bshd", y, attention["k"])), jnp.einsum("bsm,mhd->bshd", y, attention["v"])
        k, v = (jnp.repeat(a, config.heads // config.kv_heads, axis=2) for a in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(config.head_dim)
        window = config.windows[n % len(config.windows)]
        seen = (visible if window is None else visible & (behind < window))[:, None]
        p = nn.softmax(jnp.where(seen, scores, -1e30), -1) * seen
        x = x + jnp.einsum("bhqk,bkhd,hdm->bqm", p, v, attention["out"])
        y = norm(x, layer["mlp_norm"]["scale"])
        x = x + (nn.silu(y @ mlp["gate"]) * (y @ mlp["up"])) @ mlp["down"]
    head = embedding.T if config.tied_embeddings else weights["head"]
    return norm(x, weights["norm"]["scale"]) @ head


def naive_loss(state, config, batch):
    losses = -jnp.take_along_axis(
        nn.log_softmax(naive_logits(state, config, batch)), batch["targets"][..., None], axis=-1
    )
    return (losses[..., 0] * batch["weights"]).sum() / batch["weights"].sum()


@pytest.mark.parametrize(
    ("changes", "remat"),
    [
        ({}, "none"),
        ({"tied_embeddings": False, "mlp_chunk": 7}, "full"),
        ({"layers": 5, "window": (5, None)}, "attention"),  # the pattern twice, and its begin
        ({"layers": 1, "window": 5}, "block"),
    ],
)
def test_loss_and_gradients_match_a_naive_decoder(tiny, changes, remat):
    config = tiny().config.model_copy(update=changes)
    case = tiny(config=config, remat=remat)
    batch = case.batch()
    definition, state = nnx.split(case.decoder())
    step = jax.jit(jax.value_and_grad(lambda state, batch: case.loss(nnx.merge(definition, state), batch)))
    loss, gradients = step(state, batch)
    expected, expected_gradients = jax.jit(jax.value_and_grad(naive_loss), static_argnums=1)(state, config, batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5 * float(jnp.abs(want).max()))
    assert float(expected) == pytest.approx(np.log(64), rel=0.05)  # it starts near the uniform guess


@pytest.fixture(scope="module")
def logits(tiny):
    """Logits of natural-order tokens with two documents: 0 ... 15 and 16 ... 31."""
    decoder = tiny().decoder()
    segments = jnp.repeat(jnp.array([[0, 1]], jnp.int32), 16, axis=1)
    positions = jnp.tile(jnp.arange(16, dtype=jnp.int32), (1, 2))

    @jax.jit
    def run(tokens):
        return decoder.logits(decoder.hidden(tokens, positions, segments))[0]

    return run


@pytest.mark.parametrize("changed", [0, 5, 15, 16, 30])
def test_a_token_influences_itself_and_later_tokens_of_its_document_only(logits, changed):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (1, 32)))
    moved = np.abs(logits(tokens) - logits(tokens.at[0, changed].add(1))).max(-1) > 0
    expected = np.arange(32) >= changed
    expected &= np.arange(32) // 16 == changed // 16
    np.testing.assert_array_equal(moved, expected)


def test_it_runs_eagerly_without_a_mesh_and_without_segments(tiny):
    decoder = tiny().decoder()
    tokens = jnp.zeros((1, 8), jnp.int32)
    hidden = decoder.hidden(tokens, jnp.arange(8)[None])
    assert hidden.shape == (1, 8, 32)
    assert decoder.logits(hidden).shape == (1, 8, 64)


def test_bfloat16_computes_near_float32_and_keeps_float32_weights(tiny):
    case = tiny(dtype="bfloat16")
    decoder, batch = case.decoder(), case.batch()
    assert {leaf.dtype for leaf in jax.tree.leaves(decoder)} == {jnp.dtype(jnp.float32)}
    assert decoder.hidden(batch["tokens"], batch["positions"], batch["segment_ids"]).dtype == jnp.bfloat16
    assert float(case.loss(decoder, batch)) == pytest.approx(float(tiny().loss(tiny().decoder(), batch)), rel=5e-3)


def test_parameters_are_stacked_named_and_counted(tiny):
    config = tiny().config
    abstract = nnx.eval_shape(tiny().decoder)
    per_layer = 2 * 32 + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    assert count_parameters(abstract) == config.layers * per_layer + 64 * 32 + 32
    assert abstract.blocks.attention.q.shape == (1, 2, 32, 4, 8)
    assert abstract.blocks.attention.q.get_metadata("dims") == ("rounds", "layers", "embed", "heads", "head_dim")
    assert abstract.norm.scale.get_metadata("dims") == ("embed",)


def test_layers_start_different_and_outputs_small(tiny):
    weights = nnx.to_pure_dict(nnx.state(tiny().decoder().blocks))
    assert not np.array_equal(weights["mlp"]["up"][0, 0], weights["mlp"]["up"][0, 1])
    assert float(np.std(weights["mlp"]["up"])) == pytest.approx(32**-0.5, rel=0.1)
    assert float(np.std(weights["mlp"]["down"])) == pytest.approx(48**-0.5 / 2, rel=0.1)  # / sqrt(2 N), N = 2


def test_what_the_backward_pass_keeps_and_whether_layers_are_a_loop_change_no_gradient(tiny):
    config = tiny().config.model_copy(update={"layers": 3, "window": (6, None)})
    batch = tiny().batch()

    def gradients(**choices):
        case = tiny(config=config, **choices)
        definition, state = nnx.split(case.decoder())
        program = (
            jax.jit(jax.grad(lambda state: case.loss(nnx.merge(definition, state), batch))).lower(state).compile()
        )
        return program, jax.tree.leaves(program(state))

    plain, want = gradients(remat="none")
    assert trips(plain)
    for choices in (
        {"scan": False, "remat": "none"},
        *({"remat": remat} for remat in ("attention", "block", "full")),
        {"remat": "block", "offload": True},  # a CPU leaves them where they are
    ):
        program, found = gradients(**choices)
        assert program.as_text() != plain.as_text()
        for got, expected in zip(found, want, strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("offload", [False, True])
def test_inputs_of_blocks_wait_where_they_are_told_to(tiny, offload):
    case = tiny(remat="block", offload=offload)
    definition, state = nnx.split(case.decoder())
    program = jax.make_jaxpr(jax.grad(lambda state: case.loss(nnx.merge(definition, state), case.batch())))(state)
    assert set(re.findall(r"(<host>)?\[2,4,32,32\]", str(program))) == {"<host>" if offload else ""}


def test_offload_needs_something_to_be_recomputed(tiny):
    with pytest.raises(ValueError, match="remat='none' keeps more: use attention, block, full"):
        tiny(remat="none", offload=True).decoder()


def test_places_without_a_target_count_for_nothing(tiny):
    case, decoder, batch = tiny(), tiny().decoder(), tiny().batch()
    batch["weights"] = np.where(np.arange(32) % 3 == 0, 0, batch["weights"])
    want = case.loss(decoder, batch)
    targets = np.where(np.arange(32) % 3 == 0, -100, batch["targets"])
    weights = np.where(np.arange(32) % 3 == 0, 1, batch["weights"])
    assert case.loss(decoder, batch | {"targets": targets, "weights": weights}) == want


def test_an_unknown_remat_is_refused():
    with pytest.raises(ValueError, match="remat must be one of none, attention, block, full; got 'all'"):
        Decoder(
            ModelConfig(),
            64,
            attention=AttentionConfig(),
            dtype=jnp.dtype("float32"),
            remat="all",
            rngs=nnx.Rngs(0),
        )
