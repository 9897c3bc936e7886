"""Memory of one device at the fullest moment of a step, by what it is for.

Arguments are exact. Of the temporaries, what is saved for the backward pass and what is proportional to the table is
exact too; how many arrays of the tokens of one layer are alive at its fullest moment is the compiler's affair, and
counted in programs compiled for each platform (`_ALIVE`).
"""

import math
from dataclasses import dataclass, fields

from ringjax.config import Config
from ringjax.planner.machine import Machine
from ringjax.planner.sizes import Sizes
from ringjax.planner.strategies import RING, Strategy

MARGIN = 0.05  # of a device's memory left free: predictions may be as much too low


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
      weights: parameters, float32.
      optimizer: two moments, float32.
      batch: tokens, targets, weights, positions and segments.
      gradients: of the layers, float32.
      saved: what the backward pass finds of the layers.
      attention: state of one layer: queries, output, two blocks of keys and values, and in the backward pass the
        gradient of the queries and two of the blocks, in float32.
      layer: other arrays of the layer that is at work, and its weights in use.
      loss: the table in use, its gradient in float32, and the logits of a chunk.
      scratch: of kernels.
      host: in the host's memory instead, no part of the total.
    """

    weights: int
    optimizer: int
    batch: int
    gradients: int
    saved: int
    attention: int
    layer: int
    loss: int
    scratch: int
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
    """Arrays alive at the fullest moment of a layer's backward pass, beyond what `Memory.attention` lists.

    Attributes:
      embed: of [tokens, M].
      mlp: of [tokens, F].
      heads: of [tokens, H D].
      blocks: of [tokens, 2 K D].
      table: of the table, in float32.
      none_mlp, none_embed: further arrays that train.remat=none saves of a layer.
    """

    embed: float
    mlp: float
    heads: float
    blocks: float
    table: float
    none_mlp: float
    none_embed: float


_ALIVE = {
    "cpu": _Alive(embed=6.9, mlp=9.0, heads=4.0, blocks=1.0, table=2.5, none_mlp=5.0, none_embed=8.0),
    "gpu": _Alive(embed=4.0, mlp=4.0, heads=2.0, blocks=2.0, table=2.0, none_mlp=5.0, none_embed=8.0),
    "tpu": _Alive(embed=4.0, mlp=4.0, heads=2.0, blocks=2.0, table=2.0, none_mlp=5.0, none_embed=8.0),
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
    alive = _ALIVE[platform]
    wire = 4 if platform == "cpu" else size.wire
    tokens = size.rows * size.tokens
    heads, blocks = tokens * size.heads * size.head_dim, 2 * tokens * size.kv_heads * size.head_dim
    embed, mlp = tokens * size.dim, tokens * size.mlp_dim
    if config.model.mlp_chunk is not None:
        mlp = min(mlp, config.model.mlp_chunk * size.mlp_dim)
    saved, host = _saved(config, size, alive, wire)
    attention = heads * (wire + 4 + 4) + blocks * (2 * wire + (2 * 4 if size.mesh["seq"] > 1 else 4))
    layer = wire * (alive.embed * embed + alive.mlp * mlp + alive.heads * heads + alive.blocks * blocks)
    in_use = size.layer_matrices * wire if size.mesh["fsdp"] * size.mesh["seq"] > 1 else 0
    parameters = size.stored_parameters
    pieces = size.mesh["fsdp"] * size.mesh["seq"]
    return Memory(
        weights=4 * parameters,
        optimizer=8 * parameters,
        batch=_batch(config, size),
        gradients=4 * size.own_layers * (size.layer_matrices + size.layer_norms) // pieces
        + (4 * parameters if config.optim.accumulate > 1 else 0),
        saved=saved,
        attention=attention + strategy.extra_bytes(size),
        layer=round(layer + in_use),
        loss=round(alive.table * 4 * size.table) + _chunk(size),
        scratch=0,
        host=host,
    )


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
    each = {
        "full": inputs,
        "block": inputs + result,
        "attention": inputs + result + qkv,
        "none": inputs
        + result
        + qkv
        + round(wire * tokens * (alive.none_mlp * size.mlp_dim + alive.none_embed * size.dim)),
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
