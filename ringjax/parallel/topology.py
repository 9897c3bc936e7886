"""Machines that are not here: the devices of a TPU slice or of NVIDIA hosts, for programs that are only compiled.

Compilers need no hardware. jax's plugins for TPUs and NVIDIA GPUs describe devices by the name of a machine, and what
is compiled for these is what would run there.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax.experimental import topologies

from ringjax.planner import Chip, TopologyError, read_topology

# What XLA must know of a GPU, besides what they all share: figures of its own target specifications.
_GPUS = {
    "a100": {
        "compute": "major: 8 minor: 0",
        "description": "NVIDIA A100-SXM4-80GB",
        "core_count": 108,
        "fpus_per_core": 64,
        "clock_rate_ghz": 1.41,
        "memory_bandwidth": 2_039_040_000_000,
        "l2_cache_size": 41_943_040,
        "shared_memory_per_core": 167_936,
        "shared_memory_per_block_optin": 166_912,
    },
    "h100": {
        "compute": "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES",
        "description": "NVIDIA H100 80GB HBM3",
        "core_count": 132,
        "fpus_per_core": 128,
        "clock_rate_ghz": 1.98,
        "memory_bandwidth": 3_352_320_000_000,
        "l2_cache_size": 52_428_800,
        "shared_memory_per_core": 233_472,
        "shared_memory_per_block_optin": 232_448,
    },
    "h200": {
        "compute": "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES",
        "description": "NVIDIA H200",
        "core_count": 132,
        "fpus_per_core": 128,
        "clock_rate_ghz": 1.98,
        "memory_bandwidth": 4_800_000_000_000,
        "l2_cache_size": 52_428_800,
        "shared_memory_per_core": 233_472,
        "shared_memory_per_block_optin": 232_448,
    },
    "b200": {
        "compute": "major: 10 minor: 0 feature_extension: ACCELERATED_FEATURES",
        "description": "NVIDIA B200",
        "core_count": 148,
        "fpus_per_core": 128,
        "clock_rate_ghz": 1.965,
        "memory_bandwidth": 7_672_320_000_000,
        "l2_cache_size": 132_644_864,
        "shared_memory_per_core": 233_472,
        "shared_memory_per_block_optin": 232_448,
    },
}
_EVERY_GPU = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49_152,
    "threads_per_core_limit": 2048,
    "block_dim_limit_x": 2_147_483_647,
    "block_dim_limit_y": 65_535,
    "block_dim_limit_z": 65_535,
    "registers_per_core_limit": 65_536,
    "registers_per_block_limit": 65_536,
}


@dataclass(frozen=True)
class Topology:
    """A machine by its devices.

    Attributes:
      name: as it was asked for.
      chip: what it is made of.
      devices: of jax, to make a mesh of; nothing can be put on them.
    """

    name: str
    chip: Chip
    devices: Sequence[Any]


def get_topology(name: str) -> Topology:
    """The machine of a name: kind of chip, then chips along each side of a TPU slice, or hosts and GPUs of a host.

    Call it before jax has started: the host must compute with its CPU only.

    Args:
      name: as "v5p:4x4x8", "h100:8" or "h100:4x8".

    Raises:
      TopologyError: there is no such machine (the nearest name is in the message), or the plugin that compiles for
        it is missing (so is the extra that brings it).
    """
    chip, sizes = read_topology(name)
    jax.config.update("jax_platforms", "cpu")  # the host has no part in this, whatever it is made of
    devices = _tpus(name, chip, sizes) if chip.platform == "tpu" else _gpus(name, chip, sizes)
    assert len(devices) == prod(sizes) * chip.devices
    return Topology(name, chip, devices)


def _tpus(name: str, chip: Chip, sizes: list[int]) -> Sequence[Any]:
    # Nobody to ask about this machine, and other processes may compile too.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # jax makes one device of the two cores of a v4 chip unless told otherwise; the description does not.
    more = {"chip_config_name": "megacore"} if chip.name == "v4" else {}
    label = f"{chip.name}:{'x'.join(map(str, sizes))}"
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=label, **more).devices
    except RuntimeError as error:
        if "not installed" in str(error):
            raise _missing(name, "tpu", error) from error
        raise TopologyError(
            f"there is no such slice as {name!r} ({error}); its sides are multiples of what a host has, 2x2 chips"
        ) from error


def _gpus(name: str, chip: Chip, sizes: list[int]) -> Sequence[Any]:
    hosts, each = sizes if len(sizes) == 2 else (1, sizes[0])
    try:
        return topologies.get_topology_desc(
            platform="cuda", topology_name="", topology=f"{hosts}x1x{each}", target_config=_target(chip)
        ).devices
    except (NotImplementedError, RuntimeError) as error:
        raise _missing(name, "cuda13-compiler", error) from error


def _target(chip: Chip) -> str:
    """What XLA calls the specification of a target, as text."""
    figures = dict(_GPUS[chip.name])
    compute, description = figures.pop("compute"), figures.pop("description")
    figures |= _EVERY_GPU | {"device_memory_size": chip.memory}
    lines = "\n".join(f"  {key}: {value}" for key, value in figures.items())
    return (
        f"gpu_device_info {{\n  cuda_compute_capability {{ {compute} }}\n{lines}\n}}\n"
        'platform_name: "CUDA"\ndnn_version_info { major: 9 minor: 10 }\n'
        f'device_description_str: "{description}"\n'
    )


def _missing(name: str, extra: str, error: Exception) -> TopologyError:
    return TopologyError(
        f"nothing here compiles for {name} ({error}): install the extra for it, pip install 'ringjax[{extra}]', in "
        "an environment of its own if there is another accelerator's already"
    )
