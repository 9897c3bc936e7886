"""How long one step takes, and what it waits for.

Assumed, and to be known when a figure is read:

- Dense layers, attention and the loss reach the rates of the chip; see `hardware.Chip`.
- The ring's hops hide under attention as far as the timeline of the lap lets them. Weights brought together for a
  layer hide under the layer before it, gradients under the backward pass; what is longer is exposed. What "tensor"
  and "stage" send is exposed.
- Bubble ticks of a pipeline take as long as others.
"""

from dataclasses import dataclass, fields
from math import prod

from ringjax.config import Config
from ringjax.planner.flops import model_flops
from ringjax.planner.machine import Machine
from ringjax.planner.sizes import Sizes
from ringjax.planner.strategies import RING, Strategy
from ringjax.planner.timeline import Attention, Lap
from ringjax.planner.traffic import transfers
from ringjax.planner.work import layer_work, loss_work

CONVENTION = (
    "model FLOPs over peak: causal counted as half, windows and packed documents exactly, backward as twice forward, "
    "recomputation not counted"
)
_OPTIMIZER_BYTES = 28  # of a parameter: weight, gradient and two moments read, all but the gradient written, float32


@dataclass(frozen=True)
class Seconds:
    """Of one step, by what the time goes to; their sum is the step.

    Attributes:
      dense: projections and MLP.
      recompute: of dense layers, for the backward pass.
      attention: of the mean device.
      imbalance: what the busiest device has more of attention than the mean one, and waiting for it.
      merge: of partial results.
      exchange: hops, or another strategy's messages, that hide under nothing.
      tensor: sums over "tensor".
      weights: bringing weights together, and summing gradients, beyond what hides.
      stages: messages between pipeline stages.
      loss: the output head.
      optimizer: reading and writing parameters and moments.
      bubble: pipeline stages with nothing to do.
    """

    dense: float
    recompute: float
    attention: float
    imbalance: float
    merge: float
    exchange: float
    tensor: float
    weights: float
    stages: float
    loss: float
    optimizer: float
    bubble: float

    @property
    def total(self) -> float:
        return sum(getattr(self, one.name) for one in fields(self))

    @property
    def limit(self) -> str:
        """The largest part."""
        return max((one.name for one in fields(self)), key=lambda name: getattr(self, name))


@dataclass(frozen=True)
class Window:
    """Attention of the layers that have one window.

    Attributes:
      window: tokens; None = all.
      layers: of the model.
      forward: one lap.
      backward: one lap.
    """

    window: int | None
    layers: int
    forward: Lap
    backward: Lap


@dataclass(frozen=True)
class Estimate:
    """One step on a machine.

    Attributes:
      seconds: by part.
      windows: laps, by window.
      flops: model FLOPs of a step, on all devices.
      tokens: of a step.
      mfu: see `CONVENTION`; of the peak for the run's precision.
    """

    seconds: Seconds
    windows: tuple[Window, ...]
    flops: float
    tokens: int
    mfu: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds.total

    def days(self, tokens: float) -> float:
        """To train on so many tokens."""
        return tokens / self.tokens_per_s / 86_400


def is_fused(config: Config) -> bool:
    """Whether the block kernel merges partial results by itself, as ringjax's own for each platform do."""
    return config.attention.kernel not in ("xla", "splash", "cudnn")


def laps(
    config: Config, size: Sizes, machine: Machine, documents: tuple[int, ...] | None, strategy: Strategy
) -> tuple[Window, ...]:
    """Forward and backward laps of each window of the model."""
    link = None if strategy.name == "all-gather" else machine.hop_link(size.mesh, "seq")
    found = []
    for window, layers in size.windows.items():
        attention = Attention(
            config.attention.layout,
            strategy.ring(size),
            strategy.block(size),
            documents,
            window,
            config.train.precision,
            is_fused(config),
        )
        found.append(Window(window, layers, *attention.laps(machine.chip, link)))
    return tuple(found)


def estimate(
    config: Config,
    vocab_size: int,
    machine: Machine,
    documents: tuple[int, ...] | None = None,
    strategy: Strategy = RING,
) -> Estimate:
    """Predict a step.

    Args:
      config: a run that `check_config` accepts, of as many devices as the machine.
      vocab_size: V.
      machine: where it runs.
      documents: tokens of each document of a row, in order; None = one.
      strategy: how keys meet queries.
    """
    size = Sizes.of(config, vocab_size)
    windows = laps(config, size, machine, documents, strategy)
    sent = _sent(config, vocab_size, size, machine)
    sent["exchange"] = strategy.exchange_seconds(size, machine, config.train.remat == "full")
    seconds = _seconds(config, size, machine, windows, sent)
    tokens = config.data.batch * config.data.seq_len
    flops = model_flops(config, vocab_size, documents)
    peak = machine.chip.peak_of(config.train.precision)
    return Estimate(seconds, windows, flops, tokens, flops / (seconds.total * peak * machine.devices))


def _sent(config: Config, vocab_size: int, size: Sizes, machine: Machine) -> dict[str, float]:
    """Seconds of everything that a step sends but for the ring, by purpose."""
    total: dict[str, float] = dict.fromkeys(("weights", "gradients", "tensor", "stages"), 0.0)
    for one in transfers(config, vocab_size, machine.chip.platform):
        if one.purpose == "stages" and one.kind == "collective-permute":
            link = machine.hop_link(size.mesh, "stage")
            total["stages"] += one.bytes / link.bandwidth + link.latency * 4 * size.ticks
        elif one.purpose != "ring":
            pieces = prod(size.mesh[axis] for axis in one.axes) if one.kind == "reduce-scatter" else 1
            total[one.purpose] += machine.collective_seconds(one.kind, one.axes, size.mesh, one.bytes * pieces)
    return total


def _seconds(
    config: Config, size: Sizes, machine: Machine, windows: tuple[Window, ...], sent: dict[str, float]
) -> Seconds:
    """All parts of a step. Times of runs are those of all parts of a batch, bubble left out."""
    chip, precision, parts = machine.chip, config.train.precision, config.optim.accumulate
    rate, work = chip.dense(precision), layer_work(config, size)
    useful = config.microbatches * size.own_layers
    runs, idle = parts * useful, parts * (size.runs - useful)
    # Few tokens: reading the weights takes longer than multiplying.
    read = size.layer_matrices * size.wire / chip.memory_bandwidth
    forward = max(work.forward / rate, read)
    again, backward = work.again / rate, max(work.backward / rate, 2 * read)
    replay = 2 if config.train.remat == "full" else 1
    lap = {"attention": 0.0, "merge": 0.0, "ring": 0.0, "total": 0.0}
    for window in windows:
        share = window.layers / size.layers
        for one, times in ((window.forward, replay), (window.backward, 1)):
            lap["attention"] += share * times * float(one.compute.sum(axis=1).mean())
            lap["merge"] += share * times * float(one.merge[0].sum())
            lap["ring"] += share * times * one.exposed
            lap["total"] += share * times * one.seconds
    imbalance = max(0.0, lap["total"] - lap["attention"] - lap["merge"] - lap["ring"])
    layer = forward + again + backward + lap["total"]
    hidden = {
        "weights": runs * (forward + again + lap["total"] / 3),
        "gradients": runs * (backward + lap["total"] / 2),
    }
    exposed = sum(max(0.0, sent[name] - hidden[name]) for name in hidden)
    return Seconds(
        dense=runs * (forward + backward),
        recompute=runs * again,
        attention=runs * lap["attention"],
        imbalance=runs * imbalance,
        merge=runs * lap["merge"],
        exchange=runs * (lap["ring"] + sent["exchange"]),
        tensor=sent["tensor"],
        weights=exposed,
        stages=sent["stages"],
        loss=parts * loss_work(size) / rate,
        optimizer=size.stored_parameters * _OPTIMIZER_BYTES / chip.memory_bandwidth,
        bubble=idle * layer,
    )
