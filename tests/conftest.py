"""Every test runs on 16 virtual CPU devices in float32; nothing is skipped for want of hardware."""

import os

import jax
import pytest
from jax._src import compiler

DEVICES = 16

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", DEVICES)

# No persistent compilation cache, here or in the commands that tests start: when XLA (jax 0.10 to 0.12) reads a CPU
# program back, it forgets the order of its collectives, and devices then wait for each other for ever.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="session", autouse=True)
def programs_are_compiled_once():
    """Equal programs share one executable in memory: most of the suite's time is compilation.

    jax has no public place for this. Programs that call back into Python are left out.
    """
    compile_program, programs = compiler.compile_or_get_cached, {}

    def compile_once(backend, computation, devices, options, host_callbacks, *rest):
        if host_callbacks:
            return compile_program(backend, computation, devices, options, host_callbacks, *rest)
        key = (str(computation), tuple(device.id for device in devices.flat), options.SerializeAsString())
        if key not in programs:
            programs[key] = compile_program(backend, computation, devices, options, host_callbacks, *rest)
        return programs[key]

    compiler.compile_or_get_cached = compile_once
    yield
    compiler.compile_or_get_cached = compile_program


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file's tests on one worker, for the fixtures they share, unless the file is marked `spread`."""
    for item in items:
        if item.get_closest_marker("spread") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))


@pytest.fixture(scope="session", autouse=True)
def devices():
    """The 16 virtual devices the suite is written for."""
    found = jax.devices()
    assert len(found) == DEVICES, f"the tests need {DEVICES} CPU devices, found {found}"
    return found
