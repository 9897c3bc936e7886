"""What `ringjax plan` was asked, checked and answered."""

import math
from collections.abc import Mapping
from dataclasses import replace

from ringjax.config import Config, ConfigError
from ringjax.planner import advice
from ringjax.planner.advice import Advice
from ringjax.planner.custom import load_chips
from ringjax.planner.hardware import CHIPS, NETWORKS, Chip
from ringjax.planner.machine import Machine, machine_of, machine_of_topology, platform_problems
from ringjax.planner.plan import Plan, make_plan
from ringjax.planner.sizes import AXES
from ringjax.planner.timeline import documents_of


def answer(
    config: Config,
    vocab_size: int,
    *,
    hardware: str | None = None,
    devices: int | None = None,
    topology: str | None = None,
    hardware_file: str | None = None,
    network: str | None = None,
    documents: str | None = None,
    tokens: float | None = None,
    advise: bool = False,
    plot: str | None = None,
) -> Plan | Advice:
    """A plan of the run, or with `advise` a ranking of meshes; each argument is an option of the command.

    Raises:
      ConfigError: options that do not go together, or are out of range.
      UserError: there is no such machine; or the plot cannot be drawn.
    """
    if plot is not None:
        from ringjax.planner.plot import check_plot, draw

        check_plot(plot)
    chips = CHIPS if hardware_file is None else load_chips(hardware_file)
    machine = _machine(config, hardware, devices, topology, network, chips)
    if hardware_file is not None and chips[machine.chip.name] is CHIPS.get(machine.chip.name):
        own = ", ".join(name for name, chip in chips.items() if chip is not CHIPS.get(name)) or "no chip"
        raise ConfigError(
            [f"--hardware-file {hardware_file} would be ignored: it has {own}, and the machine is {machine.name}"]
        )
    if problems := platform_problems(config, machine.chip, machine.name):
        raise ConfigError(problems)
    lengths = None if documents is None else _documents(documents, config.data.seq_len)
    if tokens is not None and not 0 < tokens < math.inf:
        raise ConfigError([f"--tokens must be a number above 0, got {tokens}"])
    if advise:
        if tokens is not None:
            raise ConfigError(["--tokens would be ignored: --advise compares steps. Leave one out"])
        if plot is not None:
            raise ConfigError(
                ["--plot draws the mesh of the settings, and --advise looks for another: leave one out"]
            )
        return advice.advise(config, vocab_size, machine, lengths)
    plan = make_plan(config, vocab_size, machine, lengths, tokens)
    if plot is not None:
        draw(plan, vocab_size, lengths, plot)
    return plan


def _machine(
    config: Config,
    hardware: str | None,
    devices: int | None,
    topology: str | None,
    network: str | None,
    chips: Mapping[str, Chip],
) -> Machine:
    """The machine that the options name."""
    if (hardware is None) == (topology is None):
        raise ConfigError(["say which machine: --hardware NAME [--devices N], or --topology NAME; one of the two"])
    if topology is not None:
        if devices is not None:
            raise ConfigError(
                [f"--devices {devices} would be ignored: --topology {topology} says how many there are"]
            )
        machine = machine_of_topology(topology, chips)
    else:
        assert hardware is not None
        count = math.prod(getattr(config.mesh, axis) for axis in AXES) if devices is None else devices
        machine = machine_of(hardware, count, chips)
    if network is None:
        return machine
    if network not in NETWORKS:
        raise ConfigError([f"--network must be one of {', '.join(NETWORKS)}, got {network!r}"])
    if machine.chip.network is None:
        raise ConfigError(
            [f"--network {network} would be ignored: {machine.chip.name} has no hosts with one between"]
        )
    if machine.hosts == 1:
        raise ConfigError([f"--network {network} would be ignored: {machine.name} is one host"])
    return replace(machine, chip=replace(machine.chip, network=NETWORKS[network]))


def _documents(text: str, seq_len: int) -> tuple[int, ...]:
    """Documents of one row."""
    parts = [part.strip() for part in text.split(",")]
    lengths = [int(part) if part.isdecimal() and part.isascii() else 0 for part in parts]
    if min(lengths) < 1:
        raise ConfigError([f"--documents must be lengths of at least 1 token, as 1000,250,4000; got {text!r}"])
    if max(lengths) > seq_len:
        raise ConfigError(
            [f"no document is longer than a row, data.seq_len={seq_len}; --documents has {max(lengths)}"]
        )
    return documents_of(lengths, seq_len)
