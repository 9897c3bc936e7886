"""A machine: how many devices of which chip, and which links an axis of the mesh gets."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, gcd, log2, prod

from ringjax.attention.kernels import KernelError, get_kernel
from ringjax.config import Config, ConfigError, UserError
from ringjax.planner.custom import find_chip
from ringjax.planner.hardware import CHIPS, Chip, Link

_NAME = re.compile(r"([a-z]\w*):(\d+(?:x\d+)*)", re.ASCII)
_EXAMPLES = "v5p:4x4x8, v5e:16x16 (chips along each side of a TPU slice), h100:8, h100:4x8 (hosts x GPUs of a host)"
MOST_DEVICES = 2**20
SLICE_DIMS = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3}  # sides of a slice


class TopologyError(UserError):
    """There is no such machine, or nothing here to compile for it with."""

    status = 2


@dataclass(frozen=True)
class Machine:
    """Devices of one kind.

    Attributes:
      name: for people.
      chip: what it is made of.
      devices: how many.
      hosts: groups with fast links inside and the network between; 1 for a TPU slice.
    """

    name: str
    chip: Chip
    devices: int
    hosts: int

    def hop_link(self, mesh: Mapping[str, int], axis: str) -> Link:
        """What a hop along an axis goes over: the slowest link of the ring counts."""
        return self._network if across_hosts(mesh, self.hosts)[axis] > 1 else self.chip.link

    def collective_seconds(self, kind: str, axes: Iterable[str], mesh: Mapping[str, int], size: float) -> float:
        """Of one collective of the whole of the axes, with the size of its result in bytes.

        Inside a host (or slice) a device sends and receives (n - 1) / n of it, on a torus both ways at once; between
        hosts the adapters of all members of a host share the work. An all-reduce does twice as much.
        """
        axes = tuple(axes)
        count = prod(mesh[axis] for axis in axes)
        if count == 1 or not size:
            return 0.0
        cuts = across_hosts(mesh, self.hosts)
        hosts = prod(cuts[axis] for axis in axes)
        inside = count // hosts
        link = self.chip.link
        seconds = link.latency * ceil(log2(count)) + size * (inside - 1) / inside / link.ring_bandwidth(2)
        if hosts > 1:
            between = size * (hosts - 1) / hosts / (inside * self._network.bandwidth)
            seconds = max(seconds, self._network.latency * ceil(log2(hosts)) + between)
        return seconds * (2 if kind == "all-reduce" else 1)

    def all_to_all_seconds(self, axis: str, degree: int, mesh: Mapping[str, int], size: float) -> float:
        """Of an exchange among neighbouring groups of `degree` devices of an axis, each with so many bytes.

        On one axis of a torus a message goes degree / 4 links in the mean, both ways at once.
        """
        link = self.chip.link
        hosts = across_hosts(mesh, self.hosts)[axis]
        inside = min(degree, mesh[axis] // hosts)
        if link.two_way:
            return link.latency * degree / 2 + size * degree / 8 / link.bandwidth
        seconds = link.latency * ceil(log2(degree)) + size * (inside - 1) / degree / link.bandwidth
        if degree > inside:
            seconds += self._network.latency + size * (degree - inside) / degree / self._network.bandwidth
        return seconds

    @property
    def _network(self) -> Link:
        assert self.chip.network is not None, "only chips with a network have several hosts"
        return self.chip.network


def across_hosts(mesh: Mapping[str, int], hosts: int) -> dict[str, int]:
    """Into how many groups of devices each axis is cut: the first axes into as many as they can.

    Args:
      mesh: devices along each axis, those that talk least first.
      hosts: groups of equally many devices, which fill the mesh.
    """
    cuts, left = {}, hosts
    for axis, size in mesh.items():
        cuts[axis] = gcd(size, left)
        left //= cuts[axis]
    assert left == 1, "the groups are equal and fill the mesh: each of their factors is in one of the axes"
    return cuts


def machine_of(hardware: str, devices: int, chips: Mapping[str, Chip] | None = None) -> Machine:
    """So many devices of one chip, in whole hosts where there are hosts.

    Args:
      hardware: name of the chip.
      devices: how many.
      chips: to choose from; None = those that ringjax knows. `load_chips` adds one's own.

    Raises:
      ConfigError: there is no such chip, or the number is out of range.

    Example:
      >>> machine = machine_of("h100", 64)
      >>> machine.hosts, machine.hop_link({"data": 1, "seq": 64}, "seq").name
      (8, '400 Gb/s network')
    """
    chip = find_chip(hardware, chips)
    most = most_devices(chip)
    if isinstance(devices, bool) or not isinstance(devices, int) or not 1 <= devices <= most:
        why = f", of which a pod of {chip.name} has so many" if most < MOST_DEVICES else ""
        raise ConfigError([f"devices must be a whole number from 1 to {most:,}{why}; got {devices!r}"])
    return Machine(f"{devices:,} x {chip.name}", chip, devices, _hosts(chip, devices))


def machine_of_topology(name: str, chips: Mapping[str, Chip] | None = None) -> Machine:
    """The machine of a topology's name, as "v5p:4x4x8" or "h100:4x8".

    Raises:
      TopologyError: there is no such machine.

    Example:
      >>> machine_of_topology("v5p:4x4x8").devices
      128
    """
    chip, sizes = read_topology(name, chips)
    devices = prod(sizes) * chip.devices
    if devices > MOST_DEVICES:
        raise TopologyError(f"{name} has {devices:,} devices; a plan takes up to {MOST_DEVICES:,}")
    if chip.platform != "tpu" and len(sizes) == 2:
        return Machine(name, chip, devices, sizes[0])
    try:
        return Machine(name, chip, devices, _hosts(chip, devices))
    except ConfigError as error:
        raise TopologyError(f"{name}: {error}") from error


def read_topology(name: str, chips: Mapping[str, Chip] | None = None) -> tuple[Chip, list[int]]:
    """The chip of a topology's name, and its sizes.

    Raises:
      TopologyError: the name is not one, or the chip is unknown.
    """
    chips = CHIPS if chips is None else chips
    match = _NAME.fullmatch(name.lower()) if isinstance(name, str) else None
    if match is None:
        raise TopologyError(f"unknown topology {name!r}: write the chip, a colon and the sizes, as {_EXAMPLES}")
    if match[1] not in chips:
        near = difflib.get_close_matches(match[1], chips, n=1, cutoff=0.4)
        meant = f"did you mean {near[0]}:{match[2]}? " if near else ""
        raise TopologyError(f"unknown chip {match[1]!r} in {name!r}; {meant}The chips are {', '.join(chips)}")
    sizes = [int(size) for size in match[2].split("x")]
    if 0 in sizes:
        raise TopologyError(f"no size of a topology may be 0; got {name!r}")
    chip = chips[match[1]]
    dims = SLICE_DIMS.get(match[1])
    if dims is not None:
        _check_slice(chip, dims, sizes, name)
    if chip.platform != "tpu" and len(sizes) > 2:
        raise TopologyError(f"{match[1]} machines are GPUs, or hosts x GPUs, as h100:8 or h100:4x8; got {name!r}")
    return chip, sizes


def _check_slice(chip: Chip, dims: int, sizes: list[int], name: str) -> None:
    """Whether there are TPU slices of these sides."""
    kind = chip.name
    if len(sizes) != dims:
        raise TopologyError(f"a {kind} slice has {dims} sides, as {kind}:{'x'.join(['4'] * dims)}; got {name!r}")
    if any(size % 2 for size in sizes[:2]):
        raise TopologyError(
            f"a {kind} slice is made of hosts of 2 x 2 chips: its first two sides must be even; got {name!r}"
        )
    if chip.pod is not None and prod(sizes) * chip.devices > chip.pod:
        raise TopologyError(
            f"a {kind} slice has at most {chip.pod // chip.devices:,} chips, those of a pod; {name!r} has "
            f"{prod(sizes):,}"
        )


def most_devices(chip: Chip) -> int:
    """The largest number of devices of a chip in one machine."""
    return min(MOST_DEVICES, chip.pod or MOST_DEVICES)


def platform_problems(config: Config, chip: Chip, where: str) -> list[str]:
    """What a run asks for that is of other machines, a sentence each.

    Args:
      config: the run.
      chip: of the machine.
      where: the machine's name, for people.
    """
    problems = []
    if config.run.platform not in ("auto", chip.platform):
        problems.append(f"run.platform={config.run.platform}, and {where} is a {chip.platform}: leave it out")
    if config.attention.kernel != "auto":  # which finds one, and on CPUs compiles it
        try:
            get_kernel(config.attention.kernel, chip.platform)
        except KernelError as error:
            problems.append(f"attention.kernel: {error}")
    return problems


def _hosts(chip: Chip, devices: int) -> int:
    """Of so many devices."""
    if chip.host is None or devices <= chip.host:
        return 1
    if devices % chip.host:
        below = devices // chip.host * chip.host
        raise ConfigError(
            [
                f"{devices:,} devices of {chip.name} are no whole hosts of {chip.host}; use {below:,} or "
                f"{below + chip.host:,}"
            ]
        )
    if chip.network is None:
        raise ConfigError([f"{devices:,} devices of {chip.name} need a network (network_gb_per_s), and it has none"])
    return devices // chip.host
