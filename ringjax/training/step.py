"""One optimizer step, and one evaluation, as pure functions of state and batch."""

from collections.abc import Callable
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import optax
from einops import rearrange
from flax import nnx

from ringjax.models import Decoder, Dropout, token_loss_sum
from ringjax.parallel import constrain
from ringjax.training.state import TrainState

Batch = dict[str, jax.Array]  # the leaves of `ringjax.data.Split.batch`, [B, S] each
Metrics = dict[str, jax.Array]


def loss_sum(
    definition: nnx.GraphDef, params: nnx.State, batch: Batch, dropout: Dropout | None = None
) -> tuple[jax.Array, jax.Array]:
    """Sum of weighted token losses in nats, and sum of weights, over all tokens of the batch.

    Args:
      definition: of a `Decoder`, from `nnx.split`.
      params: its parameters.
      batch: tokens, targets, weights, positions, segment_ids, each [B, S] in layout order.
      dropout: in training; None = nothing is dropped.
    """
    decoder: Decoder = nnx.merge(definition, params)
    hidden_BSM = decoder.hidden(batch["tokens"], batch["positions"], batch["segment_ids"], dropout)
    return token_loss_sum(decoder, hidden_BSM, batch["targets"], batch["weights"], decoder.config.loss_chunk)


def make_train_step(
    definition: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    accumulate: int,
    seed: int = 0,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Build the step `(state, batch, stops=None) -> (state, metrics)`.

    The loss is the sum of token losses over all devices and all parts of the batch, divided by the sum of token
    weights over all of them: the same number for every mesh and every `accumulate`, however uneven the parts.

    Args:
      definition: of a `Decoder`.
      optimizer: its transformation.
      schedule: its learning rate, as a function of the steps done; for the metrics.
      accumulate: parts that the batch is cut into, one after another. B must be a multiple.
      seed: with the step, the layer, the row of the batch, the head and the two positions it decides which attention
        weights are dropped, whatever the mesh and the parts.

    Returns:
      A pure function. Its metrics are loss (nats per token), grad_norm (before clipping), lr and weight (the
      tokens that counted). With `stops`, an array with a number for each device, there is also stop, the largest of
      them: how processes agree on when to stop.
    """

    def gradients(params: nnx.State, batch: Batch, dropout: Dropout) -> tuple[jax.Array, jax.Array, nnx.State]:
        value_and_grad = jax.value_and_grad(lambda p: loss_sum(definition, p, batch, dropout), has_aux=True)
        (loss, weight), grads = value_and_grad(params)
        return loss, weight, grads

    def step(state: TrainState, batch: Batch, stops: jax.Array | None = None) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        rows_B = constrain(jnp.arange(batch["tokens"].shape[0]), "rows")
        if accumulate == 1:
            loss, weight, grads = gradients(state.params, batch, Dropout(key, rows_B))
        else:
            # Each part takes rows from every device, so that no row moves to another one.
            cut = partial(rearrange, pattern="(b a) ... -> a b ...", a=accumulate)
            parts = jax.tree.map(cut, (batch, rows_B))
            zeros = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))

            def add(total: tuple, part: tuple[Batch, jax.Array]) -> tuple[tuple, None]:
                batch, rows_B = part
                return jax.tree.map(jnp.add, total, gradients(state.params, batch, Dropout(key, rows_B))), None

            (loss, weight, grads), _ = jax.lax.scan(add, zeros, parts)
        # A batch of nothing but padding has sums 0, 0: its loss and gradient are 0, not NaN.
        count = jnp.where(weight == 0, 1.0, weight)
        grads = jax.tree.map(lambda g: g / count, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics = {
            "loss": loss / count,
            "grad_norm": optax.tree.norm(grads),
            "lr": jnp.asarray(schedule(state.step), jnp.float32),
            "weight": weight,
        }
        if stops is not None:
            metrics["stop"] = stops.max()
        params = cast(nnx.State, optax.apply_updates(state.params, updates))
        return TrainState(state.step + 1, params, opt_state), metrics

    return step
