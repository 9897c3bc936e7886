"""A tiny decoder, a packed batch for it, and the training loss of both."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ringjax.attention import get_layout
from ringjax.config import AttentionConfig, ModelConfig
from ringjax.models import Decoder, token_loss_sum

BATCH, SEQ, VOCAB = 4, 32, 64
CONFIG = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, mlp_dim=48)


@dataclass(frozen=True)
class Tiny:
    """Builds and runs a decoder of two narrow layers; dims are all different, so that shapes can be told apart."""

    config: ModelConfig = CONFIG
    layout: str = "zigzag"
    remat: str = "none"
    dtype: str = "float32"
    chunk: int = 5  # does not divide the tokens of a device

    def decoder(self) -> Decoder:
        attention = AttentionConfig(layout=self.layout)  # type: ignore[arg-type]
        dtype = jnp.dtype(self.dtype)
        return Decoder(self.config, VOCAB, attention=attention, dtype=dtype, remat=self.remat, rngs=nnx.Rngs(0))

    def batch(self, ring: int = 1) -> dict[str, np.ndarray]:
        """Two to four documents a row, some padding, uneven weights; in layout order."""
        rng = np.random.default_rng(0)
        starts = rng.random((BATCH, SEQ)) < 0.08
        segments = np.cumsum(starts, axis=1).astype(np.int32)
        position = np.arange(SEQ) - np.maximum.accumulate(np.where(starts, np.arange(SEQ), 0), axis=1)
        segments[:, -3:] = -1
        weights = rng.uniform(0.5, 1.5, (BATCH, SEQ)) * (segments >= 0)
        natural = {
            "tokens": rng.integers(0, VOCAB, (BATCH, SEQ), dtype=np.int32),
            "targets": rng.integers(0, VOCAB, (BATCH, SEQ), dtype=np.int32),
            "weights": weights.astype(np.float32),
            "positions": position.astype(np.int32),
            "segment_ids": segments,
        }
        return {name: get_layout(self.layout).permute(x, ring) for name, x in natural.items()}

    def loss(self, decoder: Decoder, batch) -> jax.Array:
        hidden = decoder.hidden(batch["tokens"], batch["positions"], batch["segment_ids"])
        total, weight = token_loss_sum(decoder, hidden, batch["targets"], batch["weights"], self.chunk)
        return total / weight


@pytest.fixture(scope="session")
def tiny() -> type[Tiny]:
    """The class itself: each test chooses its variant."""
    return Tiny
