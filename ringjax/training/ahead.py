"""The train step compiled for a machine that is not here, and what its program says about that machine."""

import re
import tempfile
import time
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax

from ringjax.config import Config, ConfigError, UserError, check_config
from ringjax.data import get_tokenizer
from ringjax.models import count_parameters
from ringjax.parallel import Topology, covered, make_mesh, read_collectives, read_hops
from ringjax.planner import gib, model_flops, platform_problems, read_topology
from ringjax.planner.sizes import AXES
from ringjax.training.console import format_count
from ringjax.training.patience import shown
from ringjax.training.programs import build_programs, choose_vocab_size

# "Used 20.50G of 15.75G hbm", or "the total memory required for HLO temporaries (154.55G) exceeds available HBM".
_OUT_OF_MEMORY = re.compile(r"(?:Used |required for HLO temporaries \()([\d.]+)([KMGT]?)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class DoesNotFitError(UserError):
    """The program needs more memory than a device has."""


@dataclass(frozen=True)
class Memory:
    """Of one device, in bytes.

    Attributes:
      arguments: parameters, optimizer state and a batch.
      temporaries: what the step needs besides.
      program: the code itself.
      peak: all of it; results take the place of arguments.
      host: what waits in the host's memory.
      available: what a device has.
    """

    arguments: int
    temporaries: int
    program: int
    peak: int
    host: int
    available: int


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same axes, in one step, on one device; each branch counts as if it ran."""

    kind: str
    axes: tuple[str, ...] | None
    count: int
    bytes: int


@dataclass(frozen=True)
class Forecast:
    """What a compiled step tells of a machine.

    Attributes:
      topology: name of the machine.
      devices: how many.
      mesh: axes of more than one device, with their sizes.
      parameters: of the model.
      memory: of one device.
      flops: model FLOPs of a step on one device: causal counted as half, windows exactly, the backward pass as twice
        the forward pass, recomputation not at all.
      hops_covered: messages of keys, values and their gradients that a kernel of attention encloses, in one step.
      hops: all of them.
      token_messages: messages of positions and segments, a few bytes a token.
      traffic: what is sent.
      lower_s: seconds to trace and lower the step.
      compile_s: seconds to compile it.
    """

    topology: str
    devices: int
    mesh: dict[str, int]
    parameters: int
    memory: Memory
    flops: float
    hops_covered: int
    hops: int
    token_messages: int
    traffic: tuple[Traffic, ...]
    lower_s: float
    compile_s: float

    def __str__(self) -> str:
        return "\n".join(f"{name:<18} {text}" for name, text in self._lines())

    def _lines(self) -> list[tuple[str, str]]:
        memory, share = self.memory, self.memory.peak / self.memory.available
        axes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items()) or "one device"
        lines = [
            ("topology", f"{self.topology}: {self.devices:,} devices of {gib(memory.available)}, {axes}"),
            ("parameters", format_count(self.parameters)),
            (
                "memory",
                f"{gib(memory.peak)} on each device, {1 - share:.1%} free: arguments {gib(memory.arguments)}, "
                f"temporaries {gib(memory.temporaries)}, program {gib(memory.program)}",
            ),
            *([("host memory", f"{gib(memory.host)} for each device")] if memory.host else []),
            (
                "FLOPs",
                f"{self.flops:.3g} a step on each device (causal as half, backward as twice forward, nothing that is "
                "recomputed)",
            ),
            (
                "ring",
                f"hops covered {self.hops_covered:,} of {self.hops:,}; {self.token_messages:,} messages of tokens",
            ),
        ]
        for one in self.traffic:
            over = "unknown groups" if one.axes is None else ", ".join(one.axes) or "no axis"
            lines.append((one.kind, f"over {over}: {gib(one.bytes)} in {one.count:,}"))
        lines.append(("compiled", f"in {self.compile_s:.0f} s, after {self.lower_s:.0f} s of tracing and lowering"))
        return lines


def check_machine(config: Config, topology: str) -> None:
    """Whether a run goes with a machine, by the machine's name alone.

    Raises:
      ConfigError: its mesh has another number of devices, or it asks for a platform or kernel of other machines.
      TopologyError: there is no such machine.
    """
    chip, sizes = read_topology(topology)
    devices, needed = prod(sizes) * chip.devices, prod(getattr(config.mesh, axis) for axis in AXES)
    problems = []
    if devices != needed:
        problems.append(
            f"the mesh has {needed:,} devices and {topology} {devices:,}: set mesh.stage, data, fsdp, seq and tensor "
            "so that their product is that, or name a machine of the mesh's size"
        )
    problems += platform_problems(config, chip, topology)
    if problems:
        raise ConfigError(problems)


def forecast(config: Config, topology: Topology) -> tuple[Forecast, str]:
    """Compile a run's train step for a machine, and read the program.

    Args:
      config: a whole run, whose mesh has as many devices as the machine.
      topology: of `get_topology`.

    Returns:
      What there is to know, and the text of the program.

    Raises:
      ConfigError: settings that do not go together.
      MeshError: the mesh and the machine are not of one size, or the ring would cross hosts for no reason.
      DoesNotFitError: the compiler gave up for lack of memory.
    """
    if problems := check_config(config):
        raise ConfigError([str(problem) for problem in problems])
    vocab_size = choose_vocab_size(config, get_tokenizer(config.data.tokenizer).vocab_size)
    mesh = make_mesh(config.mesh, devices=topology.devices)
    started = time.perf_counter()
    with jax.set_mesh(mesh):
        programs = build_programs(config, vocab_size, mesh)
        with shown(f"lowering for {topology.name}"):
            lowered = programs.step.lower(programs.state, programs.batch)
        lower_s, started = time.perf_counter() - started, time.perf_counter()
        with shown(f"compiling for {topology.name}"):
            compiled, text = _compile(lowered, config, topology)
    compile_s = time.perf_counter() - started
    hops = read_hops(text)
    messages = [hop for hop in hops if not hop.is_of_tokens]
    done, count = covered(messages)
    result = Forecast(
        topology=topology.name,
        devices=mesh.size,
        mesh={axis: size for axis, size in mesh.shape.items() if size > 1},
        parameters=count_parameters(programs.state.params),
        memory=_memory(compiled, topology),
        flops=model_flops(config, vocab_size) / mesh.size,
        hops_covered=done,
        hops=count,
        token_messages=sum(hop.times for hop in hops if hop.is_of_tokens),
        traffic=_traffic(text, dict(mesh.shape)),
        lower_s=lower_s,
        compile_s=compile_s,
    )
    if result.memory.peak > topology.chip.memory:
        raise DoesNotFitError(_too_large(config, topology, result.memory.peak))
    return result, text


def _compile(lowered: Any, config: Config, topology: Topology) -> tuple[jax.stages.Compiled, str]:
    """The program and its text."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        except jax.errors.JaxRuntimeError as error:
            # Compilers for TPUs know when a program is too large, and say what it would need.
            if match := _OUT_OF_MEMORY.search(str(error)):
                needed = float(match[1]) * _UNITS[match[2]]
                raise DoesNotFitError(_too_large(config, topology, needed)) from error
            raise
        try:
            return compiled, compiled.as_text() or ""
        except jax.errors.JaxRuntimeError:
            # jaxlib cannot read every program for TPUs (seen: asynchronous operations of several arrays); the
            # compiler has written the same text itself.
            (file,) = Path(folder).glob("*.after_optimizations.txt")
            return compiled, file.read_text()


def _too_large(config: Config, topology: Topology, needed: float) -> str:
    """By how much a program does not fit, and what would make it smaller."""
    available = topology.chip.memory
    changes = []
    if config.train.remat == "none":
        changes.append("train.remat=block keeps less for the backward pass")
    elif not config.train.offload:
        loop = " train.scan_layers=false" if config.mesh.stage > 1 else ""
        changes.append(f"train.offload=true{loop} keeps the inputs of layers on the host")
    if config.model.mlp_chunk is None:
        changes.append("model.mlp_chunk=4096 makes the hidden values of the MLP in pieces")
    changes.append("a longer ring, on a larger topology (mesh.seq), leaves fewer tokens and weights to each device")
    if config.data.batch > config.mesh.data * config.mesh.fsdp:
        changes.append("optim.accumulate cuts the batch into parts, or data.batch may be lower")
    return (
        f"the step needs {gib(needed)} on each device of {topology.name}, which has {gib(available)}: "
        f"{gib(needed - available)} too much. What helps: {'; '.join(changes)}"
    )


def temporary_bytes(plan: Any, platform: str) -> int:
    """What a program needs besides arguments and results, from `memory_analysis()`.

    For TPUs `temp_size_in_bytes` says more than the compiler reserves: a lap with 18.2 GiB by that count compiles for
    a chip with 15.75 GiB to give away, and where one is refused, the message names the figure of
    `peak_memory_in_bytes` (jax 0.10.2, libtpu 0.0.42). On other platforms the peak counts live values only, without
    the gaps between them.
    """
    if platform != "tpu":
        return plan.temp_size_in_bytes
    return (
        plan.peak_memory_in_bytes - plan.argument_size_in_bytes - plan.output_size_in_bytes + plan.alias_size_in_bytes
    )


def _memory(compiled: jax.stages.Compiled, topology: Topology) -> Memory:
    plan = compiled.memory_analysis()
    assert plan is not None
    arguments = plan.argument_size_in_bytes
    results = plan.output_size_in_bytes - plan.alias_size_in_bytes
    program = plan.generated_code_size_in_bytes
    temporaries = temporary_bytes(plan, topology.devices[0].platform)
    return Memory(
        arguments=arguments,
        temporaries=temporaries,
        program=program,
        peak=arguments + results + temporaries + program,
        host=plan.host_temp_size_in_bytes,
        available=topology.chip.memory,
    )


def _traffic(text: str, axis_sizes: dict[str, int]) -> tuple[Traffic, ...]:
    totals: dict[tuple[str, tuple[str, ...] | None], tuple[int, int]] = {}
    for one in read_collectives(text, axis_sizes):
        count, size = totals.get((one.kind, one.axes), (0, 0))
        totals[one.kind, one.axes] = (count + one.times, size + one.bytes)
    found = [Traffic(kind, axes, count, size) for (kind, axes), (count, size) in totals.items()]
    return tuple(sorted(found, key=lambda one: -one.bytes))
