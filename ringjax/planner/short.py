"""The plan of a run in one line, for where it starts."""

import math
from typing import Any

from ringjax.config import Config, ConfigError
from ringjax.planner.estimate import estimate
from ringjax.planner.flops import model_flops
from ringjax.planner.hardware import CHIPS, Chip
from ringjax.planner.machine import machine_of
from ringjax.planner.memory import memory
from ringjax.planner.sizes import AXES
from ringjax.planner.units import gib, seconds, short

# What jax calls a kind of device, the first that fits.
_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v6": "v6e",
    "TPU7": "tpu7x",
    "NVIDIA A100": "a100",
    "NVIDIA H100": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a device, by what jax calls it; None = none that ringjax knows."""
    return next((CHIPS[name] for start, name in _KINDS.items() if device_kind.startswith(start)), None)


def short_form(config: Config, vocab_size: int, device: Any) -> str:
    """What a step is predicted to need, and, on a chip that ringjax knows, to take.

    Args:
      config: a whole run.
      vocab_size: V.
      device: of jax, one of the mesh.
    """
    text = (
        f"{gib(memory(config, vocab_size, device.platform).total)} on each device and "
        f"{model_flops(config, vocab_size):.3g} FLOPs a step"
    )
    chip = chip_of(device.device_kind)
    if chip is None:
        return text
    try:
        machine = machine_of(chip.name, math.prod(getattr(config.mesh, axis) for axis in AXES))
        found = estimate(config, vocab_size, machine)
    except ConfigError:
        return text  # no whole hosts, as far as the table knows
    return (
        f"{text}; about {seconds(found.seconds.total)}, {short(found.tokens_per_s)} tokens/s, MFU {found.mfu:.0%}, "
        f"most of it {found.seconds.limit}"
    )
