"""A tiny decoder, a packed batch for it, and the training loss of both."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ringjax.attention import get_layout
from ringjax.config import AttentionConfig, MeshConfig, ModelConfig
from ringjax.models import Decoder, Dropout, token_loss_sum
from ringjax.parallel import activation_sharding, make_mesh, state_shardings

BATCH, SEQ, VOCAB = 4, 32, 64
CONFIG = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, mlp_dim=48)


@dataclass(frozen=True)
class Tiny:
    """Builds and runs a decoder of two narrow layers; dims are all different, so that shapes can be told apart."""

    config: ModelConfig = CONFIG
    layout: str = "zigzag"
    remat: str = "none"
    offload: bool = False
    dtype: str = "float32"
    chunk: int = 5  # does not divide the tokens of a device
    scan: bool = True
    rounds: int = 1
    microbatches: int = 1
    rows: int = BATCH
    packed: bool = True
    empty_row: int | None = None  # a row of nothing but padding

    def decoder(self) -> Decoder:
        attention = AttentionConfig(layout=self.layout)  # type: ignore[arg-type]
        dtype = jnp.dtype(self.dtype)
        return Decoder(
            self.config,
            VOCAB,
            attention=attention,
            dtype=dtype,
            remat=self.remat,
            offload=self.offload,
            rounds=self.rounds,
            microbatches=self.microbatches,
            scan=self.scan,
            rngs=nnx.Rngs(0),
        )

    def batch(self, ring: int = 1) -> dict[str, np.ndarray]:
        """Two to four documents a row, some padding, uneven weights, or one plain document; in layout order."""
        rng = np.random.default_rng(0)
        starts = (rng.random((self.rows, SEQ)) < 0.08) & self.packed
        segments = np.cumsum(starts, axis=1).astype(np.int32)
        position = np.arange(SEQ) - np.maximum.accumulate(np.where(starts, np.arange(SEQ), 0), axis=1)
        if self.packed:
            segments[:, -3:] = -1
        if self.empty_row is not None:
            segments[self.empty_row] = -1
        spread = 0.5 if self.packed else 0.0
        weights = rng.uniform(1 - spread, 1 + spread, (self.rows, SEQ)) * (segments >= 0)
        natural = {
            "tokens": rng.integers(0, VOCAB, (self.rows, SEQ), dtype=np.int32),
            "targets": rng.integers(0, VOCAB, (self.rows, SEQ), dtype=np.int32),
            "weights": weights.astype(np.float32),
            "positions": position.astype(np.int32),
            "segment_ids": segments,
        }
        return {name: get_layout(self.layout).permute(x, ring) for name, x in natural.items()}

    def loss(self, decoder: Decoder, batch) -> jax.Array:
        dropout = Dropout(jax.random.key(3), jnp.arange(self.rows)) if self.config.attention_dropout else None
        hidden = decoder.hidden(batch["tokens"], batch["positions"], batch["segment_ids"], dropout)
        total, weight = token_loss_sum(decoder, hidden, batch["targets"], batch["weights"], self.chunk)
        return total / weight


@pytest.fixture(scope="session")
def tiny() -> type[Tiny]:
    """The class itself: each test chooses its variant."""
    return Tiny


class Outcome(NamedTuple):
    """What came of a case on a mesh."""

    compiled: jax.stages.Compiled
    loss: float
    gradients: nnx.State
    params: nnx.State


def run_on_mesh(case: Tiny, sizes: dict[str, int]) -> Outcome:
    """Loss and gradients of a case, with its weights stored in pieces."""
    mesh = make_mesh(MeshConfig.model_validate(sizes))
    with jax.set_mesh(mesh):
        definition, abstract = nnx.split(nnx.eval_shape(case.decoder))
        placed = state_shardings(abstract, mesh)
        params = jax.jit(lambda: nnx.state(case.decoder()), out_shardings=placed)()
        batch = jax.device_put(case.batch(mesh.shape["seq"]), activation_sharding(mesh, "rows", "seq"))
        step = jax.jit(
            jax.value_and_grad(lambda params, batch: case.loss(nnx.merge(definition, params), batch)),
            out_shardings=(None, placed),
        )
        compiled = step.lower(params, batch).compile()
        loss, gradients = compiled(params, batch)
    return Outcome(compiled, float(loss), gradients, params)


@pytest.fixture(scope="session")
def run() -> Callable[[Tiny, dict[str, int]], Outcome]:
    """`run_on_mesh`."""
    return run_on_mesh
