"""The mesh: which devices, in which order, under which axis names."""

import math
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from ringjax.config import MeshConfig
from ringjax.parallel.placement import MeshError, crossings, place, product

# Slowest links first: `jax.make_mesh` gives the last axes the fastest ones, and tensor and seq talk in every layer.
AXES = ("stage", "data", "fsdp", "seq", "tensor")
MOST_CPUS = 1024  # virtual devices: each takes memory and threads, and a slip of the pen should not take all of them
HOST_MEMORY = "pinned_host"  # jax's name of the host memory that an accelerator reaches by itself


def start_devices(config: MeshConfig, platform: str, processes: int = 1) -> list[str]:
    """Start jax's devices, with as many virtual CPU devices as the mesh needs when there is no accelerator.

    Call it before anything else touches a device: the number of CPU devices is fixed when jax starts. Calling it
    again, or after jax has started with enough devices (a notebook, a test), changes nothing.

    Args:
      config: devices along each axis.
      platform: "auto" (the best that jax finds), "cpu", "gpu" or "tpu".
      processes: of the run, each of which has as many of the virtual CPU devices.

    Returns:
      Lines for the log, such as "CPU: 4 virtual devices on 2 cores". Empty when there is nothing to say.

    Raises:
      MeshError: the platform is not there, or has fewer devices than the mesh.
    """
    devices = _devices(config, platform, processes)
    needed = _size(config)
    kind = devices[0].platform
    _check_owners([device.process_index for device in devices[:needed]], config)
    notes = crossings(devices[:needed], _sizes(config))
    if kind == "cpu" and needed > 1:
        where = "" if processes == 1 else f" in {processes} processes"
        notes.append(f"CPU: {needed} virtual devices{where} on {os.cpu_count()} cores")
    if kind != "cpu" and len(devices) > needed:
        notes.append(f"{kind.upper()}: the mesh uses {needed} of {len(devices)} devices ({product(_sizes(config))})")
    return notes


def make_mesh(config: MeshConfig, platform: str = "auto", devices: Sequence[Any] | None = None) -> Mesh:
    """Build the mesh of a run over the first devices of a platform.

    Every axis of `AXES` is there, of size 1 where it is not used, and is of type Auto: dense layers are partitioned
    by the compiler. Neighbours along tensor and seq get the fastest links: see `placement.py`.

    Args:
      config: devices along each axis.
      platform: as in `start_devices`, which need not have been called.
      devices: exactly those of the mesh, for a program that is compiled for another machine: see `topology.py`.

    Raises:
      MeshError: the platform is not there, or has fewer devices than the mesh, or they stand so that the ring
        would cross hosts for no reason.

    Example:
      >>> make_mesh(MeshConfig(seq=4), "cpu").shape["seq"]
      4
    """
    devices = _devices(config, platform)[: _size(config)] if devices is None else _all_of(devices, config)
    places = place(devices, _sizes(config), config.ring_may_cross)
    return Mesh(places, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_host_memory(mesh: Mesh) -> None:
    """Raise unless the devices can put arrays aside in their host's memory.

    Raises:
      MeshError: they cannot, as CPU devices, whose memory that is anyway.
    """
    device = mesh.devices.flat[0]
    # CPU devices have a memory of that name too, which is the one they compute in.
    if device.platform == "cpu" or HOST_MEMORY not in (memory.kind for memory in device.addressable_memories()):
        raise MeshError(
            f"train.offload=true needs devices with a memory of their own that also reach their host's "
            f"({HOST_MEMORY}), as GPUs and TPUs; these are {device.platform.upper()} devices. Set train.offload=false"
        )


def single_device_mesh() -> Mesh:
    """The mesh of jax's default device alone, for a model that runs where no mesh is set."""
    shape = (1,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=jax.devices()[:1])


def _devices(config: MeshConfig, platform: str, processes: int = 1) -> list[Any]:
    """All devices of the platform; at least as many as the mesh needs."""
    needed = _size(config)
    if platform in ("auto", "cpu"):
        _ask_for_cpus(min(-(-needed // processes), MOST_CPUS), only=platform == "cpu")
    try:
        devices = jax.devices() if platform == "auto" else jax.devices(platform)
    except (RuntimeError, AssertionError) as error:  # jax asserts that a plugin that was asked for is there
        raise MeshError(
            f"run.platform={platform} needs a {platform.upper()}, and jax finds none ({error}); install ringjax "
            f"with the extra for it (cuda12, cuda13 or tpu), or set run.platform=cpu"
        ) from error
    if len(devices) >= needed:
        return devices
    if devices[0].platform == "cpu" and needed > MOST_CPUS * processes:
        raise MeshError(
            f"the mesh needs {needed} devices ({product(_sizes(config))}), and a CPU plays at most {MOST_CPUS}; "
            f"lower mesh.{_largest(config)} or another axis (ringjax compile takes larger meshes)"
        )
    if devices[0].platform == "cpu":
        raise MeshError(
            f"the mesh needs {needed} devices ({product(_sizes(config))}), and jax has already started with "
            f"{len(devices)} CPU device(s); restart the process or notebook kernel and make the mesh before "
            f"anything else uses jax, or begin with jax.config.update('jax_num_cpu_devices', {needed})"
        )
    raise MeshError(
        f"the mesh needs {needed} devices ({product(_sizes(config))}), and there are {len(devices)} "
        f"({devices[0].device_kind}); lower mesh.{_largest(config)} or another axis until the product is at most "
        f"{len(devices)}, or add devices"
    )


def _all_of(devices: Sequence[Any], config: MeshConfig) -> Sequence[Any]:
    """The devices of a machine that the mesh must fill: a smaller program would be another one."""
    if len(devices) != _size(config):
        raise MeshError(
            f"the machine has {len(devices)} devices, and the mesh {_size(config)} ({product(_sizes(config))}); they "
            f"must be as many: change mesh.{_largest(config)} or another axis, or take another topology"
        )
    return devices


def _check_owners(owners: list[int], config: MeshConfig) -> None:
    """Raise unless every process of the run holds as many devices of the mesh."""
    counts = [owners.count(index) for index in range(jax.process_count())]
    if len(set(counts)) > 1:
        raise MeshError(
            f"every process must hold as many devices of the mesh; of {product(_sizes(config))} = {len(owners)} the "
            f"{len(counts)} processes hold {', '.join(map(str, counts))}; change the mesh, or the number of processes"
        )


def _ask_for_cpus(count: int, only: bool) -> None:
    """Set what jax starts with, if it has not started: `count` CPU devices, and no other platform if `only`."""
    if jax.config.values["jax_num_cpu_devices"] >= count:
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return  # jax has started; the caller counts the devices that are there
    if only:
        jax.config.update("jax_platforms", "cpu")  # or an unused GPU would have its memory reserved


def _sizes(config: MeshConfig) -> dict[str, int]:
    """Devices along each axis, in mesh order."""
    return {axis: config.model_dump()[axis] for axis in AXES}


def _size(config: MeshConfig) -> int:
    """Devices in all."""
    return math.prod(_sizes(config).values())


def _largest(config: MeshConfig) -> str:
    """The axis with the most devices."""
    sizes = _sizes(config)
    return max(sizes, key=lambda axis: sizes[axis])
