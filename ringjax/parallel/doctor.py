"""What this machine and installation can do, and what is wrong with them: `ringjax doctor`."""

import os
import platform
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from ringjax.attention.kernels import CpuKernel

_PACKAGES = ("ringjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_PLUGINS = ("libtpu", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
_LAUNCHERS = {
    "SLURM": "SLURM_JOB_ID",
    "Open MPI": "OMPI_COMM_WORLD_SIZE",
    "Kubernetes": "KUBERNETES_SERVICE_HOST",
    "Cloud TPU": "TPU_WORKER_HOSTNAMES",
}
_ENVIRONMENT = ("JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
      facts: (name, text) of each line.
      problems: what stands in the way of a run; each says what to do.
      warnings: what may, in some runs.
    """

    facts: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{name:<12} {text}" for name, text in self.facts]
        lines += [f"warning      {text}" for text in self.warnings]
        lines += [f"problem      {text}" for text in self.problems]
        count = len(self.problems)
        verdict = f"{count} problem{'s' if count > 1 else ''} to solve first" if count else "ready"
        return "\n".join([*lines, f"verdict      {verdict}"])


def diagnose() -> Diagnosis:
    """Look at versions, plugins, devices and the network. Starts jax's devices."""
    packages, plugins = _versions(_PACKAGES), _versions(_PLUGINS)
    devices, failure = _devices()
    facts = [
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("packages", ", ".join(f"{name} {number}" for name, number in packages.items())),
        ("plugins", ", ".join(f"{name} {number}" for name, number in plugins.items()) or "none: CPU only"),
        ("devices", failure or _described(devices)),
        ("CPU kernel", CpuKernel().missing or "compiled by this machine's C++ compiler"),
        ("processes", _launcher() or "no launcher: one process, unless the settings name others"),
        ("network", _network()),
        *((name.lower(), os.environ[name]) for name in _ENVIRONMENT if os.environ.get(name)),
    ]
    problems = [*_clashes(packages, plugins), *([f"jax cannot start its devices: {failure}"] if failure else [])]
    warnings = list(_doubts(plugins, devices))
    return Diagnosis(tuple(facts), tuple(problems), tuple(warnings))


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _devices() -> tuple[list[Any], str]:
    """The devices, or why there are none."""
    try:
        return jax.devices(), ""
    except (RuntimeError, AssertionError) as error:  # a plugin that is asked for and not there is an assertion
        asked = os.environ.get("JAX_PLATFORMS")
        why = (
            f"no plugin for JAX_PLATFORMS={asked} here; unset it, or pip install 'ringjax[tpu]' or 'ringjax[cuda13]'"
        )
        return [], (str(error) or why).splitlines()[0]


def _described(devices: list[Any]) -> str:
    kinds = [device.device_kind for device in devices]
    counted = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    limits = {(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()}
    known = sorted(limit / 2**30 for limit in limits if limit)
    return counted + (f" of {known[0]:.1f} GiB for programs" if known else "")


def _launcher() -> str:
    found = [name for name, variable in _LAUNCHERS.items() if os.environ.get(variable)]
    return f"{' and '.join(found)}: processes.detect=true finds the others" if found else ""


def _addresses() -> list[str]:
    """Of this host by its own name."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)})
    except OSError:
        return []


def _network() -> str:
    return f"{socket.gethostname()} is {', '.join(_addresses()) or 'not known by that name'}"


def _clashes(packages: dict[str, str], plugins: dict[str, str]) -> Iterator[str]:
    """Packages that do not go together."""
    ours, theirs = packages.get("jax", ""), packages.get("jaxlib", "")
    if ours.split(".")[:3] != theirs.split(".")[:3]:
        yield f"jax {ours} and jaxlib {theirs or 'missing'} are of different versions: pip install 'jaxlib=={ours}'"
    kinds = {name.split("-")[1] for name in plugins if name.startswith("jax-cuda")}
    if len(kinds) > 1:
        yield "plugins for CUDA 12 and for CUDA 13 are both installed: pip uninstall those of one of them"
    for name, number in plugins.items():
        if name.startswith("jax-cuda") and number.split(".")[:3] != theirs.split(".")[:3]:
            yield f"{name} {number} does not go with jaxlib {theirs}: pip install '{name}=={theirs}'"
    for kind in kinds:
        halves = {f"jax-{kind}-plugin", f"jax-{kind}-pjrt"}
        if missing := halves - plugins.keys():
            yield f"{missing.pop()} is missing beside the other half of the plugin: pip install 'ringjax[{kind}]'"


def _doubts(plugins: dict[str, str], devices: list[Any]) -> Iterator[str]:
    """What is well for some runs only."""
    if "libtpu" in plugins and any(name.startswith("jax-cuda") for name in plugins):
        yield "plugins for TPUs and for NVIDIA GPUs are both installed; keep them in environments of their own"
    if plugins and devices and devices[0].platform == "cpu":
        yield (
            "a plugin for an accelerator is installed, and jax finds none: runs use the CPU unless run.platform says "
            "otherwise (ringjax compile needs no accelerator)"
        )
    addresses = _addresses()
    if addresses and all(address.startswith("127.") or address == "::1" for address in addresses):
        yield (
            f"{socket.gethostname()} means this machine alone ({', '.join(addresses)}): for several hosts give "
            "processes.coordinator an address that the others reach"
        )
    if os.environ.get("LD_LIBRARY_PATH") and any(name.startswith("jax-cuda") for name in plugins):
        yield "LD_LIBRARY_PATH may put other CUDA libraries before those that jax brings: unset it if devices fail"
