"""Which mesh and which strategy: all that fit, ranked by the predicted time of a step, with the reason each loses."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from ringjax.attention.layout import get_layout
from ringjax.config import Config, ConfigError, MeshConfig, check_config
from ringjax.config.check import LARGEST
from ringjax.planner.decode import Decode
from ringjax.planner.estimate import CONVENTION, Estimate, estimate, is_fused
from ringjax.planner.machine import Machine, across_hosts, most_devices
from ringjax.planner.memory import Memory, fits, memory, room
from ringjax.planner.plan import break_even, decode_of, show_decode, show_mesh
from ringjax.planner.ring import gather_wins_from
from ringjax.planner.sizes import AXES, Sizes
from ringjax.planner.strategies import Strategy, strategies
from ringjax.planner.units import gib, seconds, short

_SAME = 1.02  # steps that differ by less are called equal
_LOSES = {
    "dense": "dense layers on fewer devices at a time",
    "recompute": "recomputing",
    "attention": "attention on fewer devices at a time",
    "imbalance": "devices that wait for busier ones",
    "merge": "merging partial results",
    "exchange": "transfers of attention that nothing hides",
    "tensor": "sums over the tensor axis",
    "weights": "weights and gradients over the links",
    "stages": "messages between stages",
    "loss": "the output head",
    "optimizer": "optimizer state on fewer devices",
    "bubble": "the bubble of the pipeline",
}


@dataclass(frozen=True)
class Candidate:
    """A mesh with a strategy.

    Attributes:
      mesh: devices along each axis.
      strategy: how keys meet queries.
      estimate: of a step.
      memory: of one device.
    """

    mesh: dict[str, int]
    strategy: Strategy
    estimate: Estimate
    memory: Memory

    @property
    def seconds(self) -> float:
        return self.estimate.seconds.total

    @property
    def rings(self) -> bool:
        """Whether keys travel around a ring."""
        return self.strategy.name in ("ring", "hybrid") and self.mesh["seq"] > self.strategy.degree

    def __str__(self) -> str:
        return show_mesh(self.mesh) + (f", {self.strategy}" if self.mesh["seq"] > 1 else "")


@dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes:
      config: the run, whose mesh is not looked at.
      machine: where.
      ranked: all that fit, the fastest first.
      considered: how many there were.
      break_even: local tokens from which hops are hidden, forward and backward, over each kind of link.
      longest: the longest context that fits, and the mesh it fits with, at the run's batch.
      decode: one token, with the cache sharded over all devices with fast links, at the run's context.
    """

    config: Config
    machine: Machine
    ranked: tuple[Candidate, ...]
    considered: int
    break_even: dict[str, tuple[float, float]]
    longest: tuple[int, dict[str, int]]
    decode: Decode

    @property
    def best(self) -> Candidate:
        return self.ranked[0]

    @property
    def runnable(self) -> Candidate | None:
        """The best that this version of ringjax runs."""
        return next((one for one in self.ranked if one.strategy.runs), None)

    def verdict(self) -> str:
        """Whether to use the ring, and what to run if the best is not in this version."""
        here = self.runnable
        if here is None or self.best.mesh["seq"] == 1 or self.best.strategy.runs:
            return self._verdict()
        return f"{self._verdict()}. In this version the best is {here}, at {seconds(here.seconds)}"

    def _verdict(self) -> str:
        ring = next((one for one in self.ranked if one.rings), None)
        other = next((one for one in self.ranked if not one.rings), None)
        if ring is None:
            return "do not use the ring here: nothing with a ring fits or divides"
        if other is None:
            return "use the ring: nothing else fits"
        if other.seconds * _SAME < ring.seconds:
            return (
                f"do not use the ring here: {other} takes {seconds(other.seconds)} a step and the best ring, {ring}, "
                f"{seconds(ring.seconds)}: {_reason(ring, other)}"
            )
        if ring.seconds * _SAME < other.seconds:
            return (
                f"use the ring: {ring} takes {seconds(ring.seconds)} a step and the best without one, {other}, "
                f"{seconds(other.seconds)}: {_reason(other, ring)}"
            )
        return (
            f"with or without a ring it is the same to within 2%: {other} takes {seconds(other.seconds)}, {ring} "
            f"{seconds(ring.seconds)}"
        )

    def as_dict(self, count: int = 5) -> dict[str, Any]:
        """For JSON."""
        return {
            "machine": self.machine.name,
            "verdict": self.verdict(),
            "considered": self.considered,
            "fit": len(self.ranked),
            "best": [
                {
                    "mesh": {axis: size for axis, size in one.mesh.items() if size > 1},
                    "strategy": str(one.strategy),
                    "runs_in_this_version": one.strategy.runs or one.mesh["seq"] == 1,
                    "seconds": one.seconds,
                    "mfu": one.estimate.mfu,
                    "memory": one.memory.total,
                    "loses_by": None if one is self.best else _reason(one, self.best),
                    "parts": asdict(one.estimate.seconds),
                }
                for one in self.shown(count)
            ],
            "mfu_convention": CONVENTION,
            "break_even_tokens": {
                link: {"forward": forward, "backward": backward}
                for link, (forward, backward) in self.break_even.items()
            },
            "decode": {**asdict(self.decode), "speedup": self.decode.speedup} if self.decode.ring > 1 else None,
            "longest_context": {"tokens": self.longest[0], "mesh": self.longest[1]},
        }

    def shown(self, count: int) -> list[Candidate]:
        """The best few, of those that differ in how rows are kept only the best, and the best that runs here."""
        found: list[Candidate] = []
        kinds: set[tuple] = set()
        for one in self.ranked:
            mesh = one.mesh
            kind = (mesh["stage"], mesh["data"] * mesh["fsdp"], mesh["seq"], mesh["tensor"], one.strategy)
            if len(found) < count and kind not in kinds:
                found.append(one)
                kinds.add(kind)
        if self.runnable is not None and self.runnable not in found:
            found.append(self.runnable)
        return found

    def __str__(self) -> str:
        fit = f"{len(self.ranked):,} of {self.considered:,} meshes and strategies fit on {self.machine.name}"
        lines = [f"{fit}. The best:", ""]
        for place, one in enumerate(self.shown(5), 1):
            mark = "" if one.strategy.runs or one.mesh["seq"] == 1 else "  [not in this version]"
            lines.append(
                f"{place}. {one!s:<44} {seconds(one.seconds):>8} a step  {short(one.estimate.tokens_per_s):>6} "
                f"tokens/s  MFU {one.estimate.mfu:.1%}  {gib(one.memory.total)}{mark}"
            )
            if one is not self.best:
                lines.append(f"   {one.seconds / self.best.seconds:.2f} x the best: {_reason(one, self.best)}")
        heads = self.config.model.heads / self.config.model.kv_heads
        fused = is_fused(self.config)
        wins = gather_wins_from(self.machine.chip, self.machine.chip.link, fused)
        lines += [
            "",
            self.verdict(),
            f"over {self.machine.chip.link.name} an all-gather that nothing hides costs less than the merges of a "
            f"hidden ring from {wins:.1f} query heads to a key/value head on",
        ]
        lines += [
            f"break-even over {link}: with {heads:g} query heads to a key/value head, hops hide from {forward:,.0f} "
            f"tokens on a device forward, {backward:,.0f} backward"
            for link, (forward, backward) in self.break_even.items()
        ]
        lines += [
            f"longest context that fits, {self.config.data.batch} a step: {self.longest[0]:,} tokens, on "
            f"{show_mesh(self.longest[1])}",
            *([f"decode: {show_decode(self.decode)}"] if self.decode.ring > 1 else []),
            f"MFU: {CONVENTION}",
        ]
        return "\n".join(lines)


def advise(config: Config, vocab_size: int, machine: Machine, documents: tuple[int, ...] | None = None) -> Advice:
    """Rank all meshes and strategies.

    Args:
      config: a run; its mesh and microbatches are not looked at.
      vocab_size: V.
      machine: where.
      documents: tokens of each document of a row; None = one.

    Raises:
      ConfigError: nothing fits, with the smallest machine on which something would.
    """
    possible = [(run, mesh) for run, mesh in _runs(config, machine)]
    ranked, considered = [], 0
    for run, mesh in possible:
        for strategy in strategies(Sizes.of(run, vocab_size)):
            considered += 1
            need = memory(run, vocab_size, machine.chip.platform, strategy)
            if fits(need, machine):
                ranked.append(
                    Candidate(mesh, strategy, estimate(run, vocab_size, machine, documents, strategy), need)
                )
    if not ranked:
        raise ConfigError([_nothing_fits(config, vocab_size, machine, possible)])
    ranked.sort(key=lambda one: (one.seconds, not one.strategy.runs, one.memory.total))
    one_row = config.model_copy(
        update={
            "mesh": MeshConfig(),
            "data": config.data.model_copy(update={"batch": 1}),
            "optim": config.optim.model_copy(update={"accumulate": 1}),
            "train": config.train.model_copy(update={"microbatches": None, "rounds": 1}),
        }
    )
    size = Sizes.of(one_row, vocab_size)
    links = [machine.chip.link, *([machine.chip.network] if machine.hosts > 1 and machine.chip.network else [])]
    return Advice(
        config=config,
        machine=machine,
        ranked=tuple(ranked),
        considered=considered,
        break_even={link.name: break_even(one_row, size, machine.chip, link) for link in links},
        longest=_longest(possible, vocab_size, machine),
        decode=decode_of(size, machine, machine.devices // machine.hosts, config.data.seq_len),
    )


def _runs(config: Config, machine: Machine) -> Iterator[tuple[Config, dict[str, int]]]:
    """The run on every mesh that fills the machine and keeps all rules."""
    base = config.model_copy(
        update={
            "train": config.train.model_copy(update={"microbatches": None}),
            "run": config.run.model_copy(update={"platform": "auto"}),
            "processes": type(config.processes)(),
        }
    )
    for sizes in _factors(machine.devices, len(AXES)):
        mesh: dict[str, int] = dict(zip(AXES, sizes, strict=True))
        # No model has so many heads that tensor should leave a host, or so many layers that stages outnumber them.
        if config.model.layers % mesh["stage"] or config.model.kv_heads % mesh["tensor"]:
            continue
        if config.data.batch % (mesh["stage"] * mesh["data"] * mesh["fsdp"]) or not _places(mesh, machine):
            continue
        run = base.model_copy(update={"mesh": MeshConfig.model_validate(mesh)})
        if not check_config(run):
            yield run, mesh


def _places(mesh: dict[str, int], machine: Machine) -> bool:
    """Whether the borders of hosts cut no ring that would fit into one: such a mesh is refused."""
    cuts = across_hosts(mesh, machine.hosts)
    inner = mesh["seq"] * mesh["tensor"]
    return cuts["seq"] * cuts["tensor"] == 1 or inner > machine.devices // machine.hosts


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of so many, in order."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factors(number // first, count - 1):
                yield (first, *rest)


def _reason(one: Candidate, best: Candidate) -> str:
    """What a candidate spends most on that a faster one does not."""
    more = {
        part.name: getattr(one.estimate.seconds, part.name) - getattr(best.estimate.seconds, part.name)
        for part in fields(best.estimate.seconds)
    }
    worst = max(more, key=lambda name: more[name])
    if more[worst] <= 0:
        return "nothing; they are equally fast"
    return f"{seconds(more[worst])} more for {_LOSES[worst]}"


def _longest(
    possible: list[tuple[Config, dict[str, int]]], vocab_size: int, machine: Machine
) -> tuple[int, dict[str, int]]:
    """The longest context that fits with a ring on any mesh, and the mesh."""

    def needs(run: Config, seq_len: int) -> int:
        longer = run.model_copy(update={"data": run.data.model_copy(update={"seq_len": seq_len})})
        return memory(longer, vocab_size, machine.chip.platform).total

    best, where = 0, possible[0][1]
    for run, mesh in possible:
        unit = get_layout(run.attention.layout).multiple(mesh["seq"]) * 128
        low, high = 0, best // unit + 1
        while high * unit < LARGEST and needs(run, high * unit) <= room(machine):
            low, high = high, 2 * high
        high = min(high, (LARGEST - 1) // unit + 1)
        if low == 0:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if needs(run, middle * unit) <= room(machine) else (low, middle)
        if low * unit > best:
            best, where = low * unit, mesh
    return best, {axis: size for axis, size in where.items() if size > 1}


def _nothing_fits(config: Config, vocab_size: int, machine: Machine, possible: list) -> str:
    """By how much, and where something would."""
    if not possible:
        return (
            f"no mesh of {machine.devices:,} devices goes with this model: its layers, heads, widths, sequence "
            f"length and batch (data.batch={config.data.batch}) must divide; a larger batch, or another number of "
            "devices, helps"
        )
    least = min(memory(run, vocab_size, machine.chip.platform).total for run, _ in possible)
    have = gib(machine.chip.memory)
    text = f"nothing fits on {machine.name}: the best mesh needs {gib(least)} of each device's {have}"
    devices = machine.devices
    while devices * 2 <= most_devices(machine.chip):
        devices *= 2
        hosts = 1 if machine.chip.host is None else max(1, devices // machine.chip.host)
        larger = Machine(f"{devices:,} x {machine.chip.name}", machine.chip, devices, hosts)
        if any(fits(memory(run, vocab_size, machine.chip.platform), larger) for run, _ in _runs(config, larger)):
            return f"{text}. Doubling the devices, {devices:,} are the smallest number on which something does"
    return (
        f"{text}. Not even {devices:,} devices are enough: what remains on each is a layer's weights in use, the "
        "table and a chunk of the loss, which more tensor parallelism or a smaller model.loss_chunk makes smaller"
    )
