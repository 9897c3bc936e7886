"""Every test runs on 16 virtual CPU devices in float32; nothing is skipped for want of hardware."""

import os
import shutil
from pathlib import Path

import jax
import pytest

DEVICES = 16

# XLA ends the process when a device has waited 40 s for the others. On a machine that is paused or crowded it may
# have to wait longer.
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
if PATIENCE.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {PATIENCE}".strip()

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", DEVICES)

# Most of the suite's time is compilation. Each program is compiled once, for this run, the next ones, and the
# commands that tests start, which find the folder in their environment.
PROGRAMS = Path(os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax")))
SECONDS = os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
BYTES = 2**30

jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
jax.config.update("jax_persistent_cache_min_compile_time_secs", float(SECONDS))


def pytest_configure(config: pytest.Config) -> None:
    """Start afresh once programs of former versions of the code have piled up."""
    if "PYTEST_XDIST_WORKER" not in os.environ and _size(PROGRAMS) > BYTES:
        shutil.rmtree(PROGRAMS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file's tests on one worker, for the fixtures they share, unless the file is marked `spread`."""
    for item in items:
        if item.get_closest_marker("spread") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*"))


@pytest.fixture(scope="session", autouse=True)
def devices():
    """The 16 virtual devices the suite is written for."""
    found = jax.devices()
    assert len(found) == DEVICES, f"the tests need {DEVICES} CPU devices, found {found}"
    return found
