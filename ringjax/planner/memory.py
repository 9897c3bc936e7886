"""Memory of one device at the fullest moment of a step, by what it is for.

That is in the backward pass of a layer, or, where the table is large and the tokens are few, in that of the loss.
Kernels keep their tiles on the chip; what they have in this memory are lists of the tiles to visit.

Arguments are exact. Of the temporaries, what is saved for the backward pass and what is proportional to the table is
exact too; how many arrays of the tokens of one layer are alive at its fullest moment is the compiler's affair, and
counted in programs compiled for each platform (`_ALIVE`).
"""

import math
from dataclasses import dataclass, fields, replace

from ringjax.config import Config
from ringjax.planner.machine import Machine
from ringjax.planner.ring import GRADIENT_BYTES
from ringjax.planner.sizes import Sizes
from ringjax.planner.strategies import RING, Strategy

_VISIT = 20  # bytes for a pair of tiles while the list is made; found in steps of 2 and 4 million tokens on a device
MARGIN = 0.05  # of a device's memory left free: predictions may be as much too low


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
      weights: parameters, float32.
      optimizer: two moments, float32.
      batch: tokens, targets, weights, positions and segments.
      gradients: of the layers, float32, with what compilers hold of them more than once.
      saved: what the backward pass finds of the layers.
      attention: state of one layer: queries, output, two blocks of keys and values, and in the backward pass the
        gradient of the queries and two of the blocks, in float32.
      scratch: of the attention kernel: the pairs of tiles that packed documents leave to visit.
      layer: other arrays of the layer that is at work, and its weights in use.
      loss: the table in use and its gradients in float32; in the backward pass of the loss also hidden states and the
        logits of a chunk.
      host: in the host's memory instead, no part of the total.
    """

    weights: int
    optimizer: int
    batch: int
    gradients: int
    saved: int
    attention: int
    scratch: int
    layer: int
    loss: int
    host: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, one.name) for one in fields(self)) - self.host

    @property
    def temporaries(self) -> int:
        """All but arguments, which the results replace."""
        return self.total - self.weights - self.optimizer - self.batch


@dataclass(frozen=True)
class _Alive:
    """Arrays alive at the fullest moment of a step, counted in compiled programs.

    In numbers of the computation's type unless said otherwise.

    Attributes:
      embed: of [tokens, M], in the backward pass of a layer.
      mlp: of [tokens, F].
      travelling: blocks of keys and values besides the own one, each with a gradient in float32; none in a ring of 1.
      table: of the table, in float32: in use, and its gradients.
      chunked: of [tokens, M], where the MLP runs in chunks.
      passing: of a microbatch [tokens, M] between the stages of a pipeline.
      gradients: of the layers' gradients: compilers for GPUs hold a part of them twice where memory is plenty.
      none_embed, none_mlp: further arrays that train.remat=none saves of a layer.
    """

    embed: float
    mlp: float
    travelling: float
    table: float
    chunked: float
    passing: float
    none_embed: float
    none_mlp: float
    gradients: float = 1.0


# Fits to what memory_analysis() says of train steps of two models on up to 18 meshes, lengths and policies (CPU), 6
# (H100) and 5 (v5p), jax 0.10.2.
_ALIVE = {
    "cpu": _Alive(
        embed=8.2, mlp=8.2, travelling=4.0, table=3.3, chunked=3.5, passing=8.0, none_embed=5.0, none_mlp=5.0
    ),
    "gpu": _Alive(
        embed=0.5,
        mlp=6.0,
        travelling=1.2,
        table=2.2,
        chunked=3.5,
        passing=8.0,
        none_embed=10.0,
        none_mlp=5.0,
        gradients=1.5,
    ),
    "tpu": _Alive(
        embed=2.0, mlp=4.0, travelling=1.2, table=1.0, chunked=3.5, passing=8.0, none_embed=11.0, none_mlp=5.0
    ),
}


def memory(config: Config, vocab_size: int, platform: str, strategy: Strategy = RING) -> Memory:
    """Predict it.

    Args:
      config: a run that `check_config` accepts.
      vocab_size: V.
      platform: whose compiler plans it: "cpu", "gpu" or "tpu". CPUs compute in float32, whatever train.precision is.
      strategy: how keys meet queries.
    """
    size = Sizes.of(config, vocab_size)
    alive = _ALIVE.get(platform, _ALIVE["gpu"])
    wire = 4 if platform == "cpu" else size.wire
    tokens = size.rows * size.tokens
    heads, blocks = tokens * size.heads * size.head_dim, 2 * tokens * size.kv_heads * size.head_dim
    embed, mlp = tokens * size.dim, tokens * size.mlp_dim
    if config.model.mlp_chunk is not None:
        mlp = min(mlp, config.model.mlp_chunk * size.mlp_dim)
    saved, host = _saved(config, size, alive, wire)
    count = 1 + (alive.travelling if strategy.ring(size) > 1 else 0)
    attention = heads * (wire + 4 + 4) + round(count * blocks * (wire + GRADIENT_BYTES))
    embeds = alive.embed
    embeds += alive.passing if size.mesh["stage"] > 1 else 0
    embeds += alive.chunked if config.model.mlp_chunk is not None else 0
    layer = wire * (embeds * embed + alive.mlp * mlp)
    layer += _weights_in_use(config, size, wire)
    parameters = size.stored_parameters
    pieces = size.mesh["fsdp"] * size.mesh["seq"]
    of_layers = 4 * size.own_layers * (size.layer_matrices + size.layer_norms) // pieces
    of_parts = 4 * parameters if config.optim.accumulate > 1 else 0
    table = round(alive.table * 4 * size.table)
    if config.optim.accumulate > 1:  # brought together once for all parts
        table += (4 + wire) * size.table
    backward = Memory(
        weights=4 * parameters,
        optimizer=8 * parameters,
        batch=_batch(config, size),
        gradients=round(alive.gradients * of_layers) + of_parts,
        saved=saved,
        attention=attention + strategy.extra_bytes(size),
        scratch=_scratch(size, platform),
        layer=round(layer),
        loss=table,
        host=host,
    )
    loss = table + _chunk(size) + 2 * wire * size.loss_tokens * size.dim
    head = replace(backward, gradients=of_parts, attention=0, scratch=0, layer=0, loss=loss)
    return max(backward, head, key=lambda moment: moment.total)


def _weights_in_use(config: Config, size: Sizes, wire: int) -> int:
    """Of one layer, brought together; chunks of the MLP have a copy of its weights in float32, and a gradient."""
    copies = 2 * 4 * 3 * size.dim * size.mlp_dim if config.model.mlp_chunk is not None else 0
    return copies + (size.layer_matrices * wire if _is_gathered(size) else 0)


def _is_gathered(size: Sizes) -> bool:
    """Whether weights in use are other arrays than those that are stored."""
    return size.mesh["fsdp"] * size.mesh["seq"] > 1


def _scratch(size: Sizes, platform: str) -> int:
    """Of the kernel for GPUs, which visits pairs of 128 queries and 64 keys; tiles for TPUs are far larger.

    The list grows with the square of a row's tokens on a device: nothing at 16 thousand, 0.6 GiB at half a million.
    """
    return round(size.rows * size.tokens**2 / (128 * 64) * _VISIT) if platform == "gpu" else 0


def _batch(config: Config, size: Sizes) -> int:
    rows = config.data.batch // math.prod(size.mesh[axis] for axis in ("stage", "data", "fsdp"))
    return 5 * 4 * rows * size.tokens


def _chunk(size: Sizes) -> int:
    """Logits and their gradient, for the tokens of a chunk."""
    return 2 * 4 * math.ceil(size.loss_tokens / size.loss_chunks) * size.vocab


def _saved(config: Config, size: Sizes, alive: _Alive, wire: int) -> tuple[int, int]:
    """What all runs of layers leave for the backward pass, on the device and in the host's memory."""
    tokens = size.rows * size.tokens
    inputs = wire * tokens * size.dim
    result = tokens * size.heads * (size.head_dim * wire + 4)
    qkv = wire * tokens * (size.heads + 2 * size.kv_heads) * size.head_dim
    others = round(wire * tokens * (alive.none_mlp * size.mlp_dim + alive.none_embed * size.dim))
    each = {
        "full": inputs,
        "block": inputs + result,
        "attention": inputs + result + qkv,
        "none": inputs + result + qkv + others + (size.layer_matrices * wire if _is_gathered(size) else 0),
    }[config.train.remat]
    if config.train.offload:
        return size.runs * (each - inputs), size.runs * inputs
    return size.runs * each, 0


def fits(memory: Memory, machine: Machine) -> bool:
    """Whether a device has so much, with a margin."""
    return memory.total <= room(machine)


def room(machine: Machine) -> float:
    """Bytes of a device that a plan may count on."""
    return (1 - MARGIN) * machine.chip.memory
