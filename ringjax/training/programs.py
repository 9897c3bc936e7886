"""The programs of a run on a mesh, and the shapes they work on: for a trainer, and for a machine that is not here."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ringjax.attention.kernels import KernelError
from ringjax.config import VOCAB_MULTIPLE, Config, ConfigError
from ringjax.optim import build_optimizer
from ringjax.parallel import Schedule, activation_sharding
from ringjax.training.state import TrainState, abstract_state, build_decoder
from ringjax.training.step import loss_sum, make_train_step

# Leaves of a batch, [B, S] each: see `ringjax.data.PackedRows`.
_BATCH = {"tokens": "int32", "targets": "int32", "weights": "float32", "positions": "int32", "segment_ids": "int32"}


@dataclass(frozen=True)
class Programs:
    """What runs on the devices.

    Attributes:
      definition: of the decoder.
      optimizer: its transformation.
      schedule: of the pipeline.
      state: shapes, types and places of the train state.
      batch: likewise of a batch.
      step: (state, batch, ...) -> (state, metrics), jitted; it takes the state's memory.
      evaluate: (params, batch) -> sums of losses and weights, jitted.
    """

    definition: nnx.GraphDef
    optimizer: optax.GradientTransformation
    schedule: Schedule
    state: TrainState
    batch: dict[str, jax.ShapeDtypeStruct]
    step: Callable[..., Any]
    evaluate: Callable[..., Any]


def build_programs(config: Config, vocab_size: int, mesh: Mesh) -> Programs:
    """Describe what a run computes. Nothing is compiled, and no device is touched.

    Args:
      config: a whole run.
      vocab_size: rows of the embedding.
      mesh: current (`jax.set_mesh`) now and whenever the programs are called or lowered.

    Raises:
      ConfigError: the attention kernel that the settings name cannot do what they ask of it.
    """
    optimizer, learning_rate = build_optimizer(config.optim, config.train.steps)
    state = abstract_state(config, vocab_size, optimizer, mesh)
    definition, _ = nnx.split(nnx.eval_shape(lambda: build_decoder(config, vocab_size)))
    step = make_train_step(definition, optimizer, learning_rate, config.optim.accumulate, config.run.seed)
    # The new state lies as the old one did, and takes its place in memory.
    shardings = jax.tree.map(lambda x: x.sharding, state)
    everywhere = NamedSharding(mesh, PartitionSpec())  # every process reads the results
    place = activation_sharding(mesh, "rows", "seq")
    shape = (config.data.batch, config.data.seq_len)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place) for name, dtype in _BATCH.items()}
    evaluate = jax.jit(partial(loss_sum, definition), out_shardings=everywhere)
    if config.attention.kernel != "auto":  # which finds one that can
        try:
            evaluate.trace(state.params, batch)
        except KernelError as error:
            raise ConfigError([f"attention.kernel: {error}"]) from error
    return Programs(
        definition=definition,
        optimizer=optimizer,
        schedule=Schedule(config.mesh.stage, config.train.rounds, config.microbatches),
        state=state,
        batch=batch,
        step=jax.jit(
            step,
            donate_argnums=0,
            out_shardings=(shardings, everywhere),
            compiler_options=_compiler_options(config, mesh),
        ),
        evaluate=evaluate,
    )


def _compiler_options(config: Config, mesh: Mesh) -> dict[str, int]:
    """What the platform's compiler must be told of the step."""
    if not config.train.offload or mesh.devices.flat[0].platform != "gpu":
        return {}
    # XLA's scheduler for GPUs takes what waits on the host for memory of the device, and lets no transfer run under
    # anything once that seems to be more than there is. In percent of the device's memory.
    return {"xla_gpu_memory_limit_slop_factor": 300}


def choose_vocab_size(config: Config, needed: int) -> int:
    """Rows of the embedding: as set, or the tokenizer's rounded up so that the tensor axis can cut them.

    Args:
      config: a whole run.
      needed: ids of the tokenizer.

    Raises:
      ConfigError: fewer rows are set than the tokenizer has ids.
    """
    if config.model.vocab_size is None:
        return math.ceil(needed / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if config.model.vocab_size < needed:
        raise ConfigError(
            [
                f"model.vocab_size: {config.model.vocab_size} is less than the {needed} ids of the tokenizer "
                f"{config.data.tokenizer!r}; use model.vocab_size >= {needed}, or null"
            ]
        )
    return config.model.vocab_size
