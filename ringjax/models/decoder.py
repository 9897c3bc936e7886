"""The decoder: embedding, a scanned stack of blocks, final norm and output head."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ringjax.config import AttentionConfig, ModelConfig
from ringjax.models.attention import Attention, Dropout
from ringjax.models.layers import RMSNorm, SwiGLU, normal_param, use
from ringjax.models.rope import rotary_angles
from ringjax.parallel import HOST_MEMORY, STACKED, Schedule, constrain, device_count, run_pipeline

# What the backward pass keeps of a block besides its input, by remat policy; it recomputes the rest. The names are
# given by `ring_attention` (its result) and by `Attention` (what goes into it). With the result kept, recomputing a
# block does not send keys and values around the ring again.
_RESULT = ("attention_out", "attention_lse")
KEPT = {
    "attention": ("attention_q", "attention_k", "attention_v", *_RESULT),
    "block": _RESULT,
    "full": (),
}


Stack = tuple[nnx.State, jax.Array]  # weights of some layers, and the numbers of these layers


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, attention: AttentionConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        output_scale = 1 / math.sqrt(2 * config.layers)  # 2N outputs are added to the residual stream
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, attention, output_scale, dtype, rngs)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = SwiGLU(config.dim, config.mlp_dim, output_scale, dtype, rngs, config.mlp_chunk)

    def __call__(
        self,
        x_BSM: jax.Array,
        rotary: tuple[jax.Array, jax.Array],
        segment_ids: jax.Array | None,
        window: int | None = None,
        dropout: Dropout | None = None,
    ) -> jax.Array:
        x_BSM = x_BSM + self.attention(self.attention_norm(x_BSM), rotary, segment_ids, window, dropout)
        return x_BSM + self.mlp(self.mlp_norm(x_BSM))


class Decoder(nnx.Module):
    """A Llama-family decoder.

    Pre-norm blocks of grouped-query attention with RoPE and of SwiGLU; no biases. Weights are float32 and cast
    to `dtype` where they are used; the residual stream has that type too. The N blocks are one block whose weights
    have leading dims "rounds" and "layers", V and N / V, in the order of the layers; they run in a `lax.scan`, and
    on a mesh with stages in a pipeline (`ringjax.parallel.run_pipeline`).

    The mesh is the one set with `jax.set_mesh` when the model is called; without one the model runs on one device.
    All inputs are in layout order on that mesh's "seq" axis.

    Args:
      config: the widths.
      vocab_size: V, rows of the embedding.
      attention: layout of the sequence, strategy and kernel.
      dtype: type of the computation, float32 or bfloat16.
      remat: what the backward pass recomputes: "none", "attention" (all but what attention takes and gives),
        "block" (all but attention's result), "full" (all of a block, with one more lap of the ring).
      offload: whether the inputs of the blocks, which every `remat` but "none" keeps for the backward pass, wait for
        it in the host's memory. Devices that have no such memory take no notice.
      rounds: groups of layers on each pipeline stage.
      microbatches: parts of the batch that follow each other through the pipeline.
      scan: whether equal layers are one loop, or each has its own piece of the program.
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
        offload: bool = False,
        rounds: int = 1,
        microbatches: int = 1,
        scan: bool = True,
        rngs: nnx.Rngs,
    ):
        if remat not in ("none", *KEPT):
            raise ValueError(f"remat must be one of none, {', '.join(KEPT)}; got {remat!r}")
        if offload and remat == "none":
            raise ValueError(
                f"offload keeps the inputs of blocks, and remat='none' keeps more: use {', '.join(KEPT)}"
            )
        for name, value in (("rounds", rounds), ("microbatches", microbatches)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if config.layers % rounds:
            raise ValueError(f"layers must be a multiple of rounds; got {config.layers} layers in {rounds} rounds")
        self.config = config
        self.rounds = rounds
        self.microbatches = microbatches
        self.scan = scan
        self.vocab_size = vocab_size
        self.dtype = dtype
        self.remat = remat
        self.offload = offload
        # Logits of a normalised vector have this times sqrt(M) as their deviation: the loss starts at about ln V.
        std = 0.25 / math.sqrt(config.dim)
        self.embedding = normal_param(rngs, (vocab_size, config.dim), ("vocab", "embed"), std)
        self.blocks = nnx.vmap(lambda rngs: Block(config, attention, dtype, rngs))(rngs.split(config.layers))
        for param in jax.tree.leaves(self.blocks, is_leaf=_is_variable):
            param.set_metadata(dims=(*STACKED, *param.get_metadata("dims")))
            param.set_value(rearrange(param[...], "(V n) ... -> V n ...", V=rounds))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        if not config.tied_embeddings:
            self.head = normal_param(rngs, (config.dim, vocab_size), ("embed", "vocab"), std)

    def hidden(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array | None = None,
        dropout: Dropout | None = None,
    ) -> jax.Array:
        """Run the decoder up to the output head.

        Args:
          tokens: [B, S] int.
          positions: [B, S] int, the place of each token in its document; RoPE turns by it.
          segment_ids: [B, S] int, the document of each token, negative for padding; None = one document a row.
          dropout: of the step, for training at a `model.attention_dropout` above 0; None = nothing is dropped.

        Returns:
          [B, S, M], after the final norm, in the type of the computation.
        """
        schedule = Schedule(device_count("stage"), self.rounds, self.microbatches)
        x_BSM = self._embed(tokens)
        definition, state = nnx.split(self.blocks)
        weights = state, rearrange(jnp.arange(self.config.layers), "(V n) -> V n", V=self.rounds)
        key, sequences = dropout if dropout is not None and self.config.attention_dropout else (None, None)
        known = (positions, segment_ids, sequences)

        def group(weights: Stack, x_BSM: jax.Array, known: tuple) -> jax.Array:
            return self._layers(definition, weights, x_BSM, *known, key=key)

        if schedule.stages > 1:
            x_BSM = run_pipeline(group, schedule, weights, x_BSM, known)
        else:
            x_BSM = group(jax.tree.map(lambda w: rearrange(w, "V n ... -> (V n) ..."), weights), x_BSM, known)
        return self.norm(x_BSM)

    def _layers(self, definition, weights: Stack, x_BSM, positions, segment_ids, sequences, key) -> jax.Array:
        """Some layers in their order, weights [n, ...]; the first of them begins the pattern of windows."""
        cos, sin = rotary_angles(positions, self.config.head_dim, self.config.rope_theta)
        rotary = (constrain(cos, "batch", "seq", None), constrain(sin, "batch", "seq", None))
        windows = self.config.windows

        def block(x_BSM: jax.Array, layer: Stack, window: int | None) -> jax.Array:
            x_BSM = checkpoint_name(x_BSM, "block_input")
            state, number = layer
            state = jax.tree.map(_without_layers, state, is_leaf=_is_variable)
            dropout = None if key is None else Dropout(jax.random.fold_in(key, number), sequences)
            return nnx.merge(definition, state)(x_BSM, rotary, segment_ids, window, dropout)

        def layers(x_BSM: jax.Array, weights: Stack, in_loop: bool = False) -> jax.Array:
            """As many as there are windows in the pattern, or fewer."""
            for index, window in zip(range(_count(weights)), windows, strict=False):
                one = partial(block, window=window)
                if self.remat != "none":
                    # A loop keeps the two passes apart by itself.
                    one = jax.checkpoint(one, policy=self._policy(), prevent_cse=not in_loop)
                x_BSM = one(x_BSM, jax.tree.map(lambda w, at=index: w[at], weights))
            return x_BSM

        period, count = len(windows), _count(weights)
        whole = count // period if self.scan else 0
        if whole:
            stacked = jax.tree.map(
                lambda w: rearrange(w[: whole * period], "(n p) ... -> n p ...", p=period), weights
            )
            x_BSM, _ = jax.lax.scan(lambda x, weights: (layers(x, weights, in_loop=True), None), x_BSM, stacked)
        for first in range(whole * period, count, period):
            x_BSM = layers(x_BSM, jax.tree.map(lambda w, at=first: w[at : at + period], weights))
        return x_BSM

    def _policy(self) -> Callable[..., Any]:
        """What the backward pass finds of a block, and where."""
        if not self.offload:
            return jax.checkpoint_policies.save_only_these_names(*KEPT[self.remat])
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=KEPT[self.remat],
            names_which_can_be_offloaded=("block_input",),
            offload_src="device",
            offload_dst=HOST_MEMORY,
        )

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
        return constrain(logits_BSV, "rows", "seq", "vocab")

    def _embed(self, tokens: jax.Array) -> jax.Array:
        """[B, S] -> [B, S, M]. Looked up in float32, so that the gradients of a frequent token add up in it."""
        table_VM = use(self.embedding, jnp.dtype(jnp.float32))
        x_BSM = jnp.take(table_VM, tokens, axis=0, mode="clip").astype(self.dtype)
        return constrain(x_BSM, "rows", "seq", "embed")


def count_parameters(tree: object) -> int:
    """Number of scalars in a model or its state, abstract or not."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _is_variable(leaf: object) -> bool:
    """Whether a node of a state is a variable, with its metadata."""
    return isinstance(leaf, nnx.Variable)


def _without_layers(param: nnx.Variable) -> nnx.Variable:
    """One layer's slice of a stacked variable, under that layer's dims: slicing leaves the names as they were."""
    return param.replace(dims=param.get_metadata("dims")[len(STACKED) :])


def _count(weights: Stack) -> int:
    """Layers of a stack."""
    return jax.tree.leaves(weights)[0].shape[0]
