"""Every test runs on 32 virtual CPU devices in float32; nothing is skipped for want of hardware."""

import gc
import os
from pathlib import Path

import jax
import pytest
from jax._src import compiler

DEVICES = 32

# Compilation is most of the suite's time, and at this size optimised programs win nothing back. The full-size checks
# (-m slow) are compiled as users' programs are, but for files that ask for `quick_compiler`. In the environment, so
# that commands which tests start do likewise.
QUICK_COMPILER = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
if jax.__version_info__ < (0, 11):  # since then there is one kind of emitter
    QUICK_COMPILER["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false"

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", DEVICES)

# No persistent compilation cache, here or in the commands that tests start: when XLA (jax 0.10 to 0.12) reads a CPU
# program back, it forgets the order of its collectives, and devices then wait for each other for ever.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
jax.config.update("jax_compilation_cache_dir", None)


def pytest_configure(config: pytest.Config) -> None:
    """Before the first program: XLA reads its flags once."""
    if "not slow" in config.option.markexpr:
        os.environ.update(QUICK_COMPILER)
        jax.config.update("jax_disable_most_optimizations", True)


# Every compiled CPU program takes memory mappings, large ones hundreds, and Linux grants a process 65530: a worker
# that has used them up dies while compiling. Where they cannot be counted, programs are.
MOST_MAPPINGS, MOST_PROGRAMS = 20_000, 300
MAPPINGS = Path("/proc/self/maps")


@pytest.fixture(scope="session", autouse=True)
def programs_are_compiled_once():
    """Equal programs share one executable in memory: most of the suite's time is compilation.

    jax has no public place for this. Programs that call back into Python are left out.
    """
    compile_program = compiler.compile_or_get_cached

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


@pytest.fixture(scope="session")
def quick_environment():
    """The environment of commands whose programs are compiled with few optimisations."""
    return os.environ | QUICK_COMPILER


@pytest.fixture
def quick_compiler():
    """Programs with few optimisations, for files with hundreds of them."""
    usual = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", usual)


programs: dict = {}


@pytest.fixture(autouse=True)
def programs_are_few():
    """Forget them all before they use up what the system grants: jax keeps its own references too."""
    yield
    full = MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS if MAPPINGS.exists() else len(programs) > MOST_PROGRAMS
    if full:
        programs.clear()
        jax.clear_caches()
        gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file's tests on one worker, for the fixtures they share, unless the file is marked `spread`."""
    for item in items:
        if item.get_closest_marker("spread") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))


@pytest.fixture(scope="session", autouse=True)
def devices():
    """The 32 virtual devices the suite is written for."""
    found = jax.devices()
    assert len(found) == DEVICES, f"the tests need {DEVICES} CPU devices, found {found}"
    return found
