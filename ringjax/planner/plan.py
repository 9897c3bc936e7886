"""What a run on a machine comes to: one object with everything that is predicted, as a table or as JSON."""

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from ringjax.attention.layout import LAYOUTS
from ringjax.config import Config, ConfigError
from ringjax.planner.decode import Decode, decode
from ringjax.planner.estimate import CONVENTION, Estimate, estimate, laps
from ringjax.planner.hardware import Chip, Link
from ringjax.planner.machine import Machine
from ringjax.planner.memory import MARGIN, Memory, fits, memory
from ringjax.planner.ring import break_even_tokens
from ringjax.planner.sizes import AXES, Sizes
from ringjax.planner.strategies import RING
from ringjax.planner.traffic import Transfer, transfers
from ringjax.planner.units import gib, seconds, short

_MEANING = {
    "dense": "dense layers",
    "recompute": "dense layers, again for the backward pass (train.remat)",
    "attention": "attention",
    "imbalance": "waiting for the device with the most attention (attention.layout)",
    "merge": "merging partial results",
    "exchange": "transfers of attention that hide under nothing",
    "tensor": "sums over the tensor axis",
    "weights": "weights and gradients over the links",
    "stages": "messages between pipeline stages",
    "loss": "the output head",
    "optimizer": "the optimizer",
    "bubble": "pipeline stages with nothing to do",
}


@dataclass(frozen=True)
class Plan:
    """A run on a machine.

    Attributes:
      config: the run.
      machine: where.
      parameters: of the model.
      memory: of one device.
      fits: whether a device has so much.
      transfers: of one step, on one device.
      estimate: of the time.
      layouts: for each layout that the lengths allow, attention of the busiest device over that of the mean one, and
        seconds of all laps of a step on one device.
      decode: one token of one sequence, with the cache sharded over the ring, at the run's context.
      break_even: local tokens from which hops are hidden, forward and backward.
      days: for `budget` tokens; None without one.
      budget: tokens to train on.
    """

    config: Config
    machine: Machine
    parameters: int
    memory: Memory
    fits: bool
    transfers: tuple[Transfer, ...]
    estimate: Estimate
    layouts: dict[str, tuple[float, float]]
    decode: Decode
    break_even: tuple[float, float]
    days: float | None
    budget: float | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; seconds, bytes, FLOPs and tokens."""
        size, times = Sizes.of(self.config, 1), self.estimate.seconds
        return {
            "machine": {"name": self.machine.name, "devices": self.machine.devices, "hosts": self.machine.hosts},
            "mesh": {axis: count for axis, count in size.mesh.items() if count > 1},
            "parameters": self.parameters,
            "memory": {**asdict(self.memory), "total": self.memory.total, "available": self.machine.chip.memory},
            "fits": self.fits,
            "flops": self.estimate.flops,
            "transfers": [asdict(one) for one in self.transfers],
            "seconds": {**asdict(times), "total": times.total},
            "limit": times.limit,
            "laps": [
                {
                    "window": one.window,
                    "layers": one.layers,
                    **{
                        name: {
                            "seconds": lap.seconds,
                            "hop_s": lap.hop,
                            "exposed_s": lap.exposed,
                            "merge_s": float(lap.merge[0].sum()),
                            "efficiency": lap.efficiency,
                            "imbalance": lap.imbalance,
                        }
                        for name, lap in (("forward", one.forward), ("backward", one.backward))
                    },
                }
                for one in self.estimate.windows
            ],
            "layouts": {
                name: {"imbalance": imbalance, "seconds": laps} for name, (imbalance, laps) in self.layouts.items()
            },
            "break_even_tokens": {"forward": self.break_even[0], "backward": self.break_even[1]},
            "decode": {**asdict(self.decode), "speedup": self.decode.speedup} if self.decode.ring > 1 else None,
            "tokens_per_s": self.estimate.tokens_per_s,
            "mfu": self.estimate.mfu,
            "mfu_convention": CONVENTION,
            "budget_tokens": self.budget,
            "days": self.days,
        }

    def __str__(self) -> str:
        return "\n".join(f"{name:<18} {text}".rstrip() for name, text in self._lines())

    def _lines(self) -> list[tuple[str, str]]:
        chip, done = self.machine.chip, self.estimate
        network = (
            f", {chip.network.name} between {self.machine.hosts} hosts"
            if self.machine.hosts > 1 and chip.network
            else ""
        )
        times = done.seconds
        lines = [
            ("machine", f"{self.machine.name}, {gib(chip.memory)} each, {chip.link.name}{network}"),
            ("mesh", show_mesh(Sizes.of(self.config, 1).mesh)),
            ("parameters", short(self.parameters)),
            ("FLOPs", f"{done.flops:.3g} a step on all devices"),
            ("memory", self._room()),
            *[(f"  {name}", gib(size)) for name, size in _parts(self.memory)],
            *[("host memory", gib(self.memory.host)) for _ in range(bool(self.memory.host))],
            *(self._ring_lines() if self.config.mesh.seq > 1 else []),
            *[
                ("sent", f"{one.purpose}: {one.kind} over {', '.join(one.axes)}, {gib(one.bytes)}")
                for one in self.transfers
            ],
            ("step", f"{seconds(times.total)}, of which most goes to {_MEANING[times.limit]}"),
            *[
                (
                    f"  {one.name}",
                    f"{seconds(getattr(times, one.name)):>8}  {getattr(times, one.name) / times.total:5.1%}",
                )
                for one in fields(times)
                if getattr(times, one.name) > 0.0005 * times.total
            ],
            (
                "speed",
                f"{short(done.tokens_per_s)} tokens/s, {short(done.tokens_per_s / self.machine.devices)} a device",
            ),
            ("MFU", f"{done.mfu:.1%} ({CONVENTION})"),
        ]
        if self.decode.ring > 1:
            lines.append(("decode", show_decode(self.decode)))
        if self.days is not None and self.budget is not None:
            lines.append(("training", f"{self.days:.3g} days for {short(self.budget)} tokens"))
        return lines

    def _room(self) -> str:
        have, need = self.machine.chip.memory, self.memory.total
        if self.fits:
            return f"{gib(need)} on each device, {1 - need / have:.1%} free"
        return f"{gib(need)} on each device: DOES NOT FIT into {gib(have)} with {MARGIN:.0%} to spare; try --advise"

    def _ring_lines(self) -> list[tuple[str, str]]:
        """Laps of each window, what other layouts would do, and whether hops can hide."""
        lines = []
        for window in self.estimate.windows:
            which = f"each of {window.layers} layers" if window.layers > 1 else "1 layer"
            which += f", window {window.window:,}" if window.window else ""
            for name, lap in (("forward", window.forward), ("backward", window.backward)):
                text = (
                    f"{which}: {seconds(lap.seconds)}, a hop {seconds(lap.hop)}, exposed {seconds(lap.exposed)}, "
                    f"busiest device {lap.imbalance:.2f} x the mean, efficiency {lap.efficiency:.1%}"
                )
                lines.append((f"lap {name}", text))
        layouts = (f"{name} {worst:.2f} x, {seconds(time)}" for name, (worst, time) in self.layouts.items())
        lines.append(("layouts", f"busiest device over the mean, laps of a step: {'; '.join(layouts)}"))
        forward, backward = self.break_even
        text = (
            f"hops hide from {forward:,.0f} tokens on a device forward, {backward:,.0f} backward; it has "
            f"{self.config.data.seq_len // self.config.mesh.seq:,}"
        )
        return [*lines, ("break-even", text)]


def make_plan(
    config: Config,
    vocab_size: int,
    machine: Machine,
    documents: tuple[int, ...] | None = None,
    budget: float | None = None,
) -> Plan:
    """Predict a run.

    Args:
      config: a run that `check_config` accepts.
      vocab_size: V.
      machine: where.
      documents: tokens of each document of a row; None = one.
      budget: tokens to train on.

    Raises:
      ConfigError: the mesh is not the machine's.

    Example:
      >>> from ringjax.config import load_config
      >>> from ringjax.planner import machine_of
      >>> plan = make_plan(load_config("configs/run/8b_1m_h100x64.yaml"), 128256, machine_of("h100", 64))
      >>> plan.fits, plan.estimate.seconds.total > 0
      (True, True)
    """
    size = Sizes.of(config, vocab_size)
    check_mesh(size.mesh, machine)
    need = memory(config, vocab_size, machine.chip.platform)
    found = estimate(config, vocab_size, machine, documents)
    return Plan(
        config=config,
        machine=machine,
        parameters=size.parameters,
        memory=need,
        fits=fits(need, machine),
        transfers=tuple(transfers(config, vocab_size, machine.chip.platform)),
        estimate=found,
        layouts=compare_layouts(config, size, machine, documents),
        decode=decode_of(size, machine, size.mesh["seq"], config.data.seq_len),
        break_even=break_even(config, size, machine.chip, machine.hop_link(size.mesh, "seq")),
        days=None if budget is None else found.days(budget),
        budget=budget,
    )


def compare_layouts(
    config: Config, size: Sizes, machine: Machine, documents: tuple[int, ...] | None
) -> dict[str, tuple[float, float]]:
    """For each layout that the lengths allow: busiest device over the mean one, and seconds of all laps of a step."""
    found = {}
    times = config.optim.accumulate * size.runs / size.layers
    for name, layout in LAYOUTS.items():
        if config.data.seq_len % layout.multiple(size.mesh["seq"]):
            continue
        run = config.model_copy(update={"attention": config.attention.model_copy(update={"layout": name})})
        windows = laps(run, size, machine, documents, RING)
        total = times * sum(one.layers * (one.forward.seconds + one.backward.seconds) for one in windows)
        work = sum(one.layers * one.forward.compute.sum(axis=1) for one in windows)
        found[name] = (float(np.max(work) / np.mean(work)), total)
    return found


def break_even(config: Config, size: Sizes, chip: Chip, link: Link) -> tuple[float, float]:
    """Local tokens from which a hop over a link is hidden with these heads, forward and backward."""
    forward, backward = (
        break_even_tokens(
            chip.attention(config.train.precision, backward),
            link.bandwidth,
            size.heads / size.kv_heads,
            share=0.5,
            backward=backward,
            wire_bytes=size.wire,
            latency=link.latency,
            heads=size.heads * size.rows,
            head_dim=size.head_dim,
        )
        for backward in (False, True)
    )
    return forward, backward


def decode_of(size: Sizes, machine: Machine, ring: int, context: int) -> Decode:
    """One token of one sequence with the cache sharded over so many devices, on the fast links if they are enough.

    Of the layers that see most; the cache is in the type of the run's computation.
    """
    chip, windows = machine.chip, [window or context for window in size.windows]
    crosses = ring > machine.devices // machine.hosts
    link = chip.network if crosses and chip.network else chip.link
    seen = min(context, max(windows))
    return decode(chip, link, ring, seen, size.heads, size.kv_heads, size.head_dim, cache_bytes=size.wire)


def check_mesh(mesh: dict[str, int], machine: Machine) -> None:
    """Raise unless the mesh fills the machine.

    Raises:
      ConfigError: it does not.
    """
    count = 1
    for axis in AXES:
        count *= mesh[axis]
    if count != machine.devices:
        raise ConfigError(
            [
                f"the mesh has {count:,} devices ({show_mesh(mesh)}) and the machine {machine.devices:,} "
                f"({machine.name}); make them equal: change an axis of mesh, or the machine, or let --advise choose"
            ]
        )


def show_mesh(mesh: dict[str, int]) -> str:
    """As "fsdp 2 x seq 8"."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "one device"


def _parts(need: Memory) -> list[tuple[str, int]]:
    return [(one.name, size) for one in fields(need) if one.name != "host" and (size := getattr(need, one.name))]


def show_decode(found: Decode) -> str:
    """In words."""
    faster = found.speedup >= 1
    times = found.speedup if faster else 1 / found.speedup
    change = f"{f'{times:,.0f}' if times >= 10 else f'{times:.2g}'} x as {'fast' if faster else 'long'}"
    return (
        f"of one token: sharing the keys and values seen over {found.ring} devices pays from {found.pays_from:,.0f} "
        f"tokens on; at {found.context:,} a layer's attention takes {seconds(found.shared)} instead of "
        f"{seconds(found.alone)}, {change}"
    )
