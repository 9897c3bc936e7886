"""The attention layer: projections and RoPE around the one call of `ringjax.attention`."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ringjax.attention import Mask, ring_attention
from ringjax.config import AttentionConfig, ModelConfig
from ringjax.models.layers import normal_param, use
from ringjax.models.rope import rotate
from ringjax.parallel import constrain, single_device_mesh


class Dropout(NamedTuple):
    """What decides which attention weights are dropped, besides heads and positions.

    Attributes:
      key: of jax.random; another one in every step and layer.
      sequences: [B] int, the number of each row in the whole batch, however the batch is cut.
    """

    key: jax.Array
    sequences: jax.Array


class Attention(nnx.Module):
    """Causal grouped-query attention over a sequence that may be sharded.

    Args:
      config: widths; `heads` is a multiple of `kv_heads`.
      attention: layout of the sequence, strategy and kernel.
      output_scale: factor on the initial size of the output projection.
      dtype: type of the computation.
      rngs: source of the initial weights.
    """

    def __init__(
        self, config: ModelConfig, attention: AttentionConfig, output_scale: float, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.attention = attention
        self.dropout_rate = config.attention_dropout
        self.dtype = dtype
        dim, heads, kv_heads, head_dim = config.dim, config.heads, config.kv_heads, config.head_dim
        std = 1 / math.sqrt(dim)
        self.q = normal_param(rngs, (dim, heads, head_dim), ("embed", "heads", "head_dim"), std)
        self.k = normal_param(rngs, (dim, kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), std)
        self.v = normal_param(rngs, (dim, kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), std)
        std = output_scale / math.sqrt(heads * head_dim)
        self.out = normal_param(rngs, (heads, head_dim, dim), ("heads", "head_dim", "embed"), std)

    def __call__(
        self,
        x_BSM: jax.Array,
        rotary: tuple[jax.Array, jax.Array],
        segment_ids: jax.Array | None,
        window: int | None = None,
        dropout: Dropout | None = None,
    ) -> jax.Array:
        """Mix tokens of the same document, each with those before it.

        Args:
          x_BSM: input, in layout order.
          rotary: cosine and sine of `rotary_angles`.
          segment_ids: [B, S] document of each token, negative for padding; None = one document a row.
          window: tokens that one sees, itself and those right before it; None = all.
          dropout: of this layer; None = nothing is dropped.

        Returns:
          [B, S, M].
        """
        q_BSHD = checkpoint_name(rotate(self._project(x_BSM, self.q, "heads"), *rotary), "attention_q")
        k_BSKD = checkpoint_name(rotate(self._project(x_BSM, self.k, "kv_heads"), *rotary), "attention_k")
        v_BSKD = checkpoint_name(self._project(x_BSM, self.v, "kv_heads"), "attention_v")
        out_BSHD = ring_attention(
            q_BSHD,
            k_BSKD,
            v_BSKD,
            mesh=single_device_mesh() if jax.sharding.get_abstract_mesh().empty else None,
            layout=self.attention.layout,
            mask=Mask(causal=True, window=window),
            segment_ids=segment_ids,
            dropout_rate=0.0 if dropout is None else self.dropout_rate,
            dropout_seed=None if dropout is None else dropout.key,
            dropout_sequences=None if dropout is None else dropout.sequences,
            strategy=self.attention.strategy,
            kernel=self.attention.kernel,
        )
        out_BSM = jnp.einsum("BSHD,HDM->BSM", out_BSHD, use(self.out, self.dtype))
        return constrain(out_BSM, "batch", "seq", "embed")

    def _project(self, x_BSM: jax.Array, weight: nnx.Param, heads: str) -> jax.Array:
        """Queries, keys or values of all heads."""
        x = jnp.einsum("BSM,MHD->BSHD", x_BSM, use(weight, self.dtype))
        return constrain(x, "batch", "seq", heads, "head_dim")
