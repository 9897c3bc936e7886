"""The decoder: embedding, a scanned stack of blocks, final norm and output head."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from ringjax.config import AttentionConfig, ModelConfig
from ringjax.models.attention import Attention
from ringjax.models.layers import RMSNorm, SwiGLU, normal_param, use
from ringjax.models.rope import rotary_angles
from ringjax.parallel import constrain

# What the backward pass keeps of a block besides its input. `ring_attention` gives these names to its
# residuals; with them kept, recomputing a block does not send keys and values around the ring again.
KEPT = ("attention_out", "attention_lse")


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, attention: AttentionConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        output_scale = 1 / math.sqrt(2 * config.layers)  # 2N outputs are added to the residual stream
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, attention, output_scale, dtype, rngs)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = SwiGLU(config.dim, config.mlp_dim, output_scale, dtype, rngs)

    def __call__(
        self, x_BSM: jax.Array, rotary: tuple[jax.Array, jax.Array], segment_ids: jax.Array | None
    ) -> jax.Array:
        x_BSM = x_BSM + self.attention(self.attention_norm(x_BSM), rotary, segment_ids)
        return x_BSM + self.mlp(self.mlp_norm(x_BSM))


class Decoder(nnx.Module):
    """A Llama-family decoder.

    Pre-norm blocks of grouped-query attention with RoPE and of SwiGLU; no biases. Weights are float32 and cast
    to `dtype` where they are used; the residual stream has that type too. The N blocks are one block whose
    weights have a leading "layers" dim, and run in a `lax.scan`.

    The mesh is the one set with `jax.set_mesh` when the model is called; without one the model runs on one device.
    All inputs are in layout order on that mesh's "seq" axis.

    Args:
      config: the widths.
      vocab_size: V, rows of the embedding.
      attention: layout of the sequence, strategy and kernel.
      dtype: type of the computation, float32 or bfloat16.
      remat: "none", or "block" to keep one input a block, with attention's result, and recompute the rest.
      rngs: source of the initial weights.

    Example:
      >>> config = ModelConfig(layers=1, dim=32, heads=2, kv_heads=1, head_dim=8, mlp_dim=48)
      >>> decoder = Decoder(
      ...     config, 64, attention=AttentionConfig(), dtype=jnp.float32, remat="none", rngs=nnx.Rngs(0)
      ... )
      >>> tokens = positions = jnp.arange(16)[None]
      >>> decoder.logits(decoder.hidden(tokens, positions)).shape
      (1, 16, 64)
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        *,
        attention: AttentionConfig,
        dtype: jnp.dtype,
        remat: str,
        rngs: nnx.Rngs,
    ):
        if remat not in ("none", "block"):
            raise ValueError(f"remat must be 'none' or 'block', got {remat!r}")
        self.config = config
        self.vocab_size = vocab_size
        self.dtype = dtype
        self.remat = remat
        # Logits of a normalised vector have this times sqrt(M) as their deviation: the loss starts at about ln V.
        std = 0.25 / math.sqrt(config.dim)
        self.embedding = normal_param(rngs, (vocab_size, config.dim), ("vocab", "embed"), std)
        self.blocks = nnx.vmap(lambda rngs: Block(config, attention, dtype, rngs))(rngs.split(config.layers))
        for param in jax.tree.leaves(self.blocks, is_leaf=_is_variable):
            param.set_metadata(dims=("layers", *param.get_metadata("dims")))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        if not config.tied_embeddings:
            self.head = normal_param(rngs, (config.dim, vocab_size), ("embed", "vocab"), std)

    def hidden(self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """Run the decoder up to the output head.

        Args:
          tokens: [B, S] int.
          positions: [B, S] int, the place of each token in its document; RoPE turns by it.
          segment_ids: [B, S] int, the document of each token, negative for padding; None = one document a row.

        Returns:
          [B, S, M], after the final norm, in the type of the computation.
        """
        x_BSM = self._embed(tokens)
        cos, sin = rotary_angles(positions, self.config.head_dim, self.config.rope_theta)
        rotary = (constrain(cos, "batch", "seq", None), constrain(sin, "batch", "seq", None))
        definition, weights = nnx.split(self.blocks)

        def body(x_BSM: jax.Array, layer: nnx.State) -> tuple[jax.Array, None]:
            layer = jax.tree.map(_without_layers, layer, is_leaf=_is_variable)
            return nnx.merge(definition, layer)(x_BSM, rotary, segment_ids), None

        if self.remat == "block":
            policy = jax.checkpoint_policies.save_only_these_names(*KEPT)
            body = jax.checkpoint(body, policy=policy, prevent_cse=False)  # scan already keeps the two passes apart
        x_BSM, _ = jax.lax.scan(body, x_BSM, weights)
        return self.norm(x_BSM)

    def head_weight(self) -> jax.Array:
        """The output head, [M, V] in the type of the computation, brought together for use."""
        if self.config.tied_embeddings:
            return use(self.embedding, self.dtype).T
        return use(self.head, self.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores of every next token, for sampling and inspection: `token_loss_sum` never holds them all.

        Args:
          hidden: [B, S, M], from `hidden`.

        Returns:
          [B, S, V] float32.
        """
        logits_BSV = jnp.einsum("BSM,MV->BSV", hidden, self.head_weight(), preferred_element_type=jnp.float32)
        return constrain(logits_BSV, "batch", "seq", "vocab")

    def _embed(self, tokens: jax.Array) -> jax.Array:
        """[B, S] -> [B, S, M]. Looked up in float32, so that the gradients of a frequent token add up in it."""
        table_VM = use(self.embedding, jnp.dtype(jnp.float32))
        x_BSM = jnp.take(table_VM, tokens, axis=0, mode="clip").astype(self.dtype)
        return constrain(x_BSM, "batch", "seq", "embed")


def count_parameters(tree: object) -> int:
    """Number of scalars in a model or its state, abstract or not."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _is_variable(leaf: object) -> bool:
    """Whether a node of a state is a variable, with its metadata."""
    return isinstance(leaf, nnx.Variable)


def _without_layers(param: nnx.Variable) -> nnx.Variable:
    """One layer's slice of a stacked variable, under that layer's dims."""
    return param.replace(dims=param.get_metadata("dims")[1:])
