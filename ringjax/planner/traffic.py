"""What devices send each other in one train step: kinds, axes and bytes, from the sizes of the model.

Letters as everywhere: B, S, H, D, K, M, F, V, N, R; L tokens of a row on one device, b rows of a microbatch on it.
Exact for programs that XLA compiles for CPUs, and so also of what is not the least that could travel:

- The tied table is gathered twice, for the lookup and for the head, rather than held through all layers; its two
  gradients are summed over the devices one by one.
- Layers of a pipeline of one round are gathered once in the forward pass, but at every tick in the backward pass, and
  there their gradients are summed over the devices at every tick too.
- XLA for CPU reduces by all-reduce where a piece is kept and a reduce-scatter would do; sums gradients over the ring
  and over the rows' devices in two all-reduces, one after the other; and sums over "tensor" what comes back through
  q, k, v, gate and up one by one.

Accelerators' compilers do better: one reduction of gradients over all axes, two sums of what comes back. For GPUs it
is a reduce-scatter, but for the gradient of the head, which is summed whole and in float32 where the computation is
in bfloat16. With data devices besides, those of layers are summed whole; with those or stages, pieces of the table's
are then summed over them, and with tensor devices too all of it is summed whole. For TPUs it is an all-reduce, and
the table is looked up in the computation's type.

Left out are scalars and what hops carry of the tokens besides keys and values, a few bytes for each.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ringjax.config import Config
from ringjax.planner.pairs import hops
from ringjax.planner.ring import GRADIENT_BYTES
from ringjax.planner.sizes import Sizes


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind and purpose, in one step, on one device.

    Attributes:
      purpose: "weights", "gradients", "ring", "tensor" or "stages".
      kind: as XLA calls it.
      axes: of the mesh, those of more than one device.
      bytes: of the results, all together.
    """

    purpose: str
    kind: str
    axes: tuple[str, ...]
    bytes: int


def transfers(config: Config, vocab_size: int, platform: str = "cpu") -> list[Transfer]:
    """Everything that one step sends.

    Args:
      config: a whole run.
      vocab_size: V.
      platform: whose compiler writes the program: "cpu", "gpu" or "tpu".
    """
    size = Sizes.of(config, vocab_size)
    found = []
    sent = (*_weights(config, size, platform), *_ring(config, size), *_activations(config, size, platform))
    for purpose, kind, axes, count in sent:
        present = tuple(axis for axis in axes if size.mesh[axis] > 1)
        if present and count:
            found.append(Transfer(purpose, kind, present, count))
    return found


def traffic(config: Config, vocab_size: int, platform: str = "cpu") -> dict[tuple[str, tuple[str, ...]], int]:
    """Bytes of one step on one device by kind and axes, as `ringjax.parallel.traffic` counts a program's."""
    total: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for one in transfers(config, vocab_size, platform):
        total[one.kind, one.axes] += one.bytes
    return dict(total)


_Sent = Iterator[tuple[str, str, tuple[str, ...], int]]


def _weights(config: Config, size: Sizes, platform: str) -> _Sent:
    """Weights are brought together for use: in the forward pass once whatever the ticks, and again where the backward
    pass runs a layer again; table, head and last norm once for all parts of a batch."""
    again = 0 if config.train.remat == "none" else size.runs
    # With several groups of layers on a stage a tick takes those of its own group.
    first = size.own_layers if config.train.rounds == 1 or size.mesh["stage"] == 1 else size.runs
    layer = size.layer_matrices * size.wire + size.layer_norms * 4
    table = size.table * (size.wire if platform == "tpu" else 4)  # looked up in float32
    ends = table + size.head * size.wire + size.dim * 4
    yield "weights", "all-gather", ("fsdp", "seq"), config.optim.accumulate * (first + again) * layer + ends
    yield from _gradients(config, size, platform, layer)


def _gradients(config: Config, size: Sizes, platform: str, layer: int) -> _Sent:
    """Those of layers are summed at every tick, those of table, head and last norm also over the stages."""
    parts = config.optim.accumulate
    of_layers, of_table = parts * size.runs * layer, parts * (size.table + size.dim) * 4
    of_head = parts * size.head * size.wire
    if platform == "cpu":
        yield "gradients", "all-reduce", ("data", "fsdp"), of_layers
        yield "gradients", "all-reduce", ("stage", "data", "fsdp"), of_table + of_head
        yield "gradients", "all-reduce", ("seq",), of_layers + of_table + of_head
        return
    axes, pieces = ("data", "fsdp", "seq"), size.mesh["fsdp"] * size.mesh["seq"]
    if platform == "tpu" or pieces == 1:
        yield "gradients", "all-reduce", axes, of_layers
        yield "gradients", "all-reduce", ("stage", *axes), of_table + of_head
        return
    if size.mesh["data"] > 1:
        yield "gradients", "all-reduce", axes, of_layers
    else:
        yield "gradients", "reduce-scatter", axes, of_layers // pieces
    norm, of_float32 = parts * size.dim * 4, of_head if size.wire == 4 else 0
    whole = norm + (0 if of_float32 else parts * size.head * 4)
    scattered = of_table - norm + of_float32
    if size.mesh["data"] * size.mesh["stage"] == 1:
        yield "gradients", "reduce-scatter", axes, (scattered + norm) // pieces
        yield "gradients", "all-reduce", axes, whole - norm
        return
    if size.mesh["tensor"] > 1:
        scattered, whole = 0, whole + scattered
    yield "gradients", "reduce-scatter", ("fsdp", "seq"), scattered // pieces
    yield "gradients", "all-reduce", ("stage", "data"), scattered // pieces
    yield "gradients", "all-reduce", ("stage", *axes), whole


def _ring(config: Config, size: Sizes) -> _Sent:
    """Keys with values forwards and backwards, and their gradients.

    A replayed lap begins with the same hop as the lap of the backward pass: it is made once.
    """
    elements = size.rows * size.tokens * size.kv_heads * 2 * size.head_dim
    total = 0
    for window, layers in size.windows.items():
        steps = hops(config.attention.layout, size.mesh["seq"], size.tokens, window)
        laps = 3 if config.train.remat == "full" else 2
        of_keys = laps * steps - (1 if laps == 3 and steps else 0)
        total += layers * (of_keys * size.wire + steps * GRADIENT_BYTES)
    yield "ring", "collective-permute", ("seq",), config.optim.accumulate * size.runs_of(total) * elements


def _activations(config: Config, size: Sizes, platform: str) -> _Sent:
    """What passes between the devices of "tensor" and of "stage".

    Tensor: what attention and the MLP give, the first of them again in the backward pass, and what comes back
    through q, k, v, gate and up. Then the lookup, and in chunks of the loss a maximum and two sums a token and what
    comes back through the head. Stage: what a tick made and what waits; positions and documents once.
    """
    parts = config.optim.accumulate
    activation = size.rows * size.tokens * size.dim
    again = 0 if config.train.remat == "none" else 1
    back = (3, 2) if platform == "cpu" else (1, 1)
    of_attention, of_mlp = (1 + again + back[0]) * activation, (1 + back[1]) * size.mlp_tokens * size.dim
    yield "tensor", "all-reduce", ("tensor",), parts * size.runs * (of_attention + of_mlp) * size.wire
    lookup = size.loss_tokens * size.dim * 4
    padded = size.loss_chunks * math.ceil(size.loss_tokens / size.loss_chunks)
    yield "tensor", "all-reduce", ("tensor",), parts * (lookup + padded * (3 * 4 + size.dim * size.wire))
    yield "stages", "collective-permute", ("stage",), parts * 2 * 2 * size.ticks * activation * size.wire
    rows = size.rows * config.microbatches
    yield "stages", "all-gather", ("stage",), parts * 2 * rows * size.tokens * 4
