"""What a training step changes: parameters, optimizer state and the number of steps done."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from ringjax.config import Config
from ringjax.models import Decoder
from ringjax.parallel import state_shardings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of a run after some steps. Everything a checkpoint holds.

    Attributes:
      step: optimizer steps done, int32 scalar.
      params: the decoder's parameters, float32.
      opt_state: what the optimizer remembers, float32.
    """

    step: jax.Array
    params: nnx.State
    opt_state: Any


def build_decoder(config: Config, vocab_size: int) -> Decoder:
    """The run's decoder with its initial weights, which depend on `run.seed` and not on the mesh."""
    return Decoder(
        config.model,
        vocab_size,
        attention=config.attention,
        dtype=jnp.dtype(config.train.precision),
        remat=config.train.remat,
        offload=config.train.offload,
        rounds=config.train.rounds,
        microbatches=config.microbatches,
        scan=config.train.scan_layers,
        rngs=nnx.Rngs(config.run.seed),
    )


def initial_state(config: Config, vocab_size: int, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step, wherever it is put: call it under `jit`, or abstractly."""
    params = nnx.state(build_decoder(config, vocab_size), nnx.Param)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def abstract_state(
    config: Config, vocab_size: int, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Shapes, types and shardings at rest of the state, without any arrays."""
    shapes = jax.eval_shape(lambda: initial_state(config, vocab_size, optimizer))
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        shapes,
        state_shardings(shapes, mesh),
    )
