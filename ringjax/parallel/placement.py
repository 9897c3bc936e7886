"""Which device stands where in the mesh: the axes that talk most get the fastest links.

Devices come in groups with fast links inside, slow ones between: slices of TPUs, hosts of GPUs. The axes before "seq"
talk least and are cut over the groups first, "stage" before "data" before "fsdp"; the ring and the tensor axis stay
inside a group if they can. Inside a group jax knows the links.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils

from ringjax.config import UserError
from ringjax.planner import across_hosts


class MeshError(UserError):
    """The devices that the settings ask for are not there, or not where the mesh would need them."""


def place(devices: Sequence[Any], sizes: dict[str, int], ring_may_cross: bool = False) -> np.ndarray:
    """Arrange devices in the shape of a mesh.

    Args:
      devices: as many as the mesh has places, of any number of groups with the same number each.
      sizes: of each axis, by name, those that talk least first.
      ring_may_cross: accept axes "seq" and "tensor" that fit into a group and are cut by a border all the same.

    Raises:
      MeshError: the groups give unequal numbers of devices, or do not divide the mesh, or their borders would cut
        "seq" or "tensor" although these fit into a group.
    """
    kind, groups = _groups(devices)
    shape, name = tuple(sizes.values()), "slice" if kind == "slice_index" else "host"
    if len(groups) == 1:
        return mesh_utils.create_device_mesh(shape, list(devices))
    counts = {key: len(group) for key, group in groups.items()}
    each = next(iter(counts.values()))
    if set(counts.values()) != {each}:
        raise MeshError(
            f"every {name} must give the mesh the same number of devices; of {product(sizes)} = {len(devices)} they "
            f"give {', '.join(f'{name} {key}: {count}' for key, count in counts.items())}; change the mesh to a "
            f"multiple of what a {name} has, or to what one has"
        )
    across = across_hosts(sizes, len(groups))
    inner = sizes.get("seq", 1) * sizes.get("tensor", 1)
    if _talking(across) and inner <= each and not ring_may_cross:
        fits = [count for count in range(1, each + 1) if each % count == 0]
        raise MeshError(
            f"mesh.seq * mesh.tensor = {inner} devices would stand on several {name}s, though the {each} of a "
            f"{name} are enough for them: the axes before them ({product(sizes)}) cannot be cut into {len(groups)} "
            f"{name}s. Make mesh.seq * mesh.tensor one of {', '.join(map(str, fits))}, or set "
            "mesh.ring_may_cross=true to run like this"
        )
    within = [size // across[axis] for axis, size in sizes.items()]
    return mesh_utils.create_hybrid_device_mesh(
        within, list(across.values()), list(devices), process_is_granule=kind == "process_index"
    )


def crossings(devices: Sequence[Any], sizes: dict[str, int]) -> list[str]:
    """Lines for the log on what crosses the borders of groups, though it talks in every layer."""
    kind, groups = _groups(devices)
    across, name = across_hosts(sizes, len(groups)), "slices" if kind == "slice_index" else "hosts"
    return [
        f"mesh.{axis} = {sizes[axis]} crosses {across[axis]} {name}: one has {len(devices) // len(groups)} devices"
        for axis in _talking(across)
    ]


def _groups(devices: Sequence[Any]) -> tuple[str, dict[int, list[Any]]]:
    """What tells the groups apart, and the devices of each."""
    slices = {getattr(device, "slice_index", 0) for device in devices}
    # TPUs of one slice have fast links whatever their hosts; of GPUs that is known only where slices are told apart.
    kind = "slice_index" if len(slices) > 1 or devices[0].platform == "tpu" else "process_index"
    groups: dict[int, list[Any]] = {}
    for device in devices:
        groups.setdefault(getattr(device, kind, 0), []).append(device)
    return kind, groups


def _talking(across: dict[str, int]) -> list[str]:
    """The axes that talk in every layer and are cut."""
    return [axis for axis in ("seq", "tensor") if across.get(axis, 1) > 1]


def product(sizes: dict[str, int]) -> str:
    """The axes that count, as "data=2 x seq=4"."""
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "seq=1"
