"""Sampling: the likeliest next token, one after another, whatever the mesh and the layout."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ringjax.config import AttentionConfig, MeshConfig, ModelConfig
from ringjax.inference import generate
from ringjax.models import Decoder
from ringjax.parallel import make_mesh, state_shardings

VOCAB = 64
PROMPT = np.array([3, 1, 4, 1, 5], np.int32)
COUNT = 20  # 25 tokens in all: no ring divides them
CONFIG = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, mlp_dim=48, tied_embeddings=False)


def build(layout: str = "zigzag") -> Decoder:
    """A decoder whose choices are far apart: an untrained one hardly prefers any token."""
    attention = AttentionConfig(layout=layout)  # type: ignore[arg-type]
    decoder = Decoder(CONFIG, VOCAB, attention=attention, dtype=jnp.dtype("float32"), remat="none", rngs=nnx.Rngs(0))
    decoder.head[...] = 20 * decoder.head[...]
    return decoder


@pytest.fixture(scope="module")
def sample():
    """Runs the decoder, sharded over a mesh; the tokens it writes."""
    params = jax.jit(lambda: nnx.state(build()))()

    def run(sizes: dict[str, int], layout: str = "zigzag", **options) -> np.ndarray:
        mesh = make_mesh(MeshConfig.model_validate(sizes))
        definition, abstract = nnx.split(nnx.eval_shape(lambda: build(layout)))
        settings: dict[str, Any] = {"temperature": 0, "num_ids": VOCAB} | options
        with jax.set_mesh(mesh):
            decoder = nnx.merge(definition, jax.device_put(params, state_shardings(abstract, mesh)))
            return generate(decoder, PROMPT, COUNT, layout=layout, **settings)

    return run


@pytest.fixture(scope="module")
def greedy() -> np.ndarray:
    """The likeliest token after each prefix, from the logits of that prefix alone."""
    definition, params = nnx.split(build())

    @jax.jit
    def logits(params, tokens_BS):
        decoder = nnx.merge(definition, params)
        positions_BS = jnp.arange(tokens_BS.shape[1])[None]
        return decoder.logits(decoder.hidden(tokens_BS, positions_BS))

    tokens = list(PROMPT)
    for _ in range(COUNT):
        # Padding is behind what counts, and never the same as what `generate` has there.
        padded = np.full((1, 32), VOCAB - 1, np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(np.argmax(logits(params, padded)[0, len(tokens) - 1])))
    return np.array(tokens[len(PROMPT) :])


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        ({}, "zigzag"),
        ({"seq": 4}, "zigzag"),
        ({"seq": 4}, "striped"),
        ({"seq": 2}, "contiguous"),
        ({"data": 2, "seq": 2, "tensor": 2}, "zigzag"),
    ],
    ids=str,
)
def test_without_temperature_each_token_is_the_likeliest(sample, greedy, sizes, layout):
    assert len(set(greedy)) > 3  # it does not just repeat itself
    np.testing.assert_array_equal(sample(sizes, layout), greedy)


def test_only_ids_below_num_ids_are_written(sample, greedy):
    bound = int(greedy.max())
    limited = sample({"seq": 4}, num_ids=bound)
    assert limited.max() < bound
    first = int(np.argmax(greedy == bound))
    np.testing.assert_array_equal(limited[:first], greedy[:first])


def test_draws_depend_on_the_seed_and_on_nothing_else(sample):
    first = sample({"seq": 4}, temperature=1.0, seed=1)
    np.testing.assert_array_equal(sample({"seq": 4}, temperature=1.0, seed=1), first)
    np.testing.assert_array_equal(sample({}, temperature=1.0, seed=1), first)
    assert not np.array_equal(sample({"seq": 4}, temperature=1.0, seed=2), first)


def test_the_text_ends_when_asked_to(sample, greedy):
    answers = iter([False, True])
    short = sample({"seq": 4}, stop=lambda: next(answers))
    assert 0 < len(short) < COUNT
    np.testing.assert_array_equal(short, greedy[: len(short)])


def test_nothing_to_add_is_nothing():
    decoder = build()
    assert generate(decoder, PROMPT, 0, layout="zigzag", num_ids=VOCAB).shape == (0,)


@pytest.mark.parametrize(
    ("prompt", "count", "num_ids", "message"),
    [
        (PROMPT[:0], 4, VOCAB, "prompt of at least 1 token and count >= 0, got 0 and 4"),
        (PROMPT, -1, VOCAB, "prompt of at least 1 token and count >= 0, got 5 and -1"),
        (PROMPT, 4, VOCAB + 1, "num_ids must be 1 to 64, the model's vocabulary, got 65"),
        (PROMPT, 4, 0, "num_ids must be 1 to 64, the model's vocabulary, got 0"),
    ],
)
def test_mistakes_are_named(prompt, count, num_ids, message):
    decoder = nnx.eval_shape(build)
    with pytest.raises(ValueError, match=message):
        generate(decoder, prompt, count, layout="zigzag", num_ids=num_ids)
