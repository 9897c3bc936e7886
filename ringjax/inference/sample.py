"""Text from a model, one token after another."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ringjax.attention import get_layout
from ringjax.models import Decoder
from ringjax.parallel import constrain, device_count

_PIECE = 16  # tokens between two looks at `stop`


def generate(
    decoder: Decoder,
    prompt: np.ndarray,
    count: int,
    *,
    layout: str,
    num_ids: int,
    temperature: float = 0.8,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> np.ndarray:
    """Continue a prompt, on the mesh set with `jax.set_mesh`.

    Every token runs the whole sequence through the model again, sharded as in training: right for a short sample
    at the end of a run, and slow for long texts.

    Args:
      decoder: the model.
      prompt: [n] token ids, at least one.
      count: tokens to add.
      layout: the layout that the decoder was built with.
      num_ids: ids 0 ... num_ids - 1 may be drawn: an embedding can have rows that stand for no text.
      temperature: divides the logits; 0 takes the likeliest token.
      seed: of the draws.
      stop: asked every few tokens; when it says yes, the text ends there.

    Returns:
      [count] int32, the new tokens; less if stopped.

    Raises:
      ValueError: the prompt is empty, count is negative, or num_ids is beyond the model's vocabulary.
    """
    if len(prompt) < 1 or count < 0:
        raise ValueError(f"generate needs a prompt of at least 1 token and count >= 0, got {len(prompt)} and {count}")
    if not 1 <= num_ids <= decoder.vocab_size:
        raise ValueError(f"num_ids must be 1 to {decoder.vocab_size}, the model's vocabulary, got {num_ids}")
    rows, ring = decoder.microbatches * device_count("batch"), device_count("seq")
    total = len(prompt) + count
    length = get_layout(layout).filled(total, ring)
    tokens = np.zeros(length, np.int32)
    tokens[: len(prompt)] = prompt
    positions = get_layout(layout).positions(length, ring)
    # Every row of the batch computes the same text: the mesh wants one for each data device and microbatch.
    tokens_BS = np.broadcast_to(tokens[positions], (rows, length))
    definition, params = nnx.split(decoder)
    run = jax.jit(partial(_generate, definition, num_ids=num_ids, temperature=temperature))
    end = len(prompt)
    while end < total and not stop():
        start, end = end, min(end + _PIECE, total)
        tokens_BS = jax.device_get(run(params, tokens_BS, positions, start, end, jax.random.key(seed)))
    return np.asarray(tokens_BS)[0, np.argsort(positions)][len(prompt) : end]


def _generate(
    definition: nnx.GraphDef,
    params: nnx.State,
    tokens_BS: jax.Array,
    positions_S: jax.Array,
    first: jax.Array,
    total: jax.Array,
    key: jax.Array,
    *,
    num_ids: int,
    temperature: float,
) -> jax.Array:
    """Fill positions first ... total - 1. What stands behind a position is not seen by it: attention is causal."""
    decoder: Decoder = nnx.merge(definition, params)
    positions_BS = jnp.broadcast_to(positions_S, tokens_BS.shape)

    def add(position: jax.Array, tokens_BS: jax.Array) -> jax.Array:
        hidden_BSM = decoder.hidden(tokens_BS, positions_BS)
        # A product with 0s and one 1, since an index into a sharded dim would gather it.
        last_BM = jnp.einsum("BSM,S->BM", hidden_BSM, (positions_S == position - 1).astype(hidden_BSM.dtype))
        logits_BV = jnp.einsum("BM,MV->BV", last_BM, decoder.head_weight(), preferred_element_type=jnp.float32)
        logits_V = logits_BV[0, :num_ids]
        if temperature == 0:
            token = jnp.argmax(logits_V)
        else:
            token = jax.random.categorical(jax.random.fold_in(key, position), logits_V / temperature)
        return jnp.where(positions_S == position, token.astype(tokens_BS.dtype), tokens_BS)

    return constrain(jax.lax.fori_loop(first, total, add, tokens_BS), None, None)
