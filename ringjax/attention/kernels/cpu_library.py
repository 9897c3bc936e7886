"""The CPU kernel's machine code: compiled by the user's own compiler when it is first needed, then kept.

What is compiled lies beside this file, in `cpu_source/`, and needs the headers that jaxlib brings and nothing else.
The result is kept in a folder of the user's, under a name made of everything it depends on, so that another version,
compiler or CPU never gets it. Nothing here runs when ringjax is imported.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path

import jax

from ringjax.attention.kernels.base import KernelError

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "cpu_source"
TARGETS = ("forward", "backward")
# GCC 9 and Clang 12 know all of this; strict arithmetic but for traps and errno, which nothing reads.
OPTIONS = ("-std=c++17", "-O2", "-ftree-vectorize", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-w")
LONGEST_COMPILATION = 600  # s


class NoLibraryError(Exception):
    """There is no machine code to run; the message says why and what to do."""


def problem(flags: tuple[str, ...]) -> str | None:
    """Why the kernel cannot run here, None if it can. The first call may compile."""
    found = _targets_or_problem(flags)
    return found if isinstance(found, str) else None


def targets(flags: tuple[str, ...]) -> dict[str, str]:
    """Names by which XLA calls the functions of `TARGETS`.

    Args:
      flags: of the compiler, for the kind of CPU.

    Raises:
      KernelError: they cannot be had.
    """
    found = _targets_or_problem(flags)
    if isinstance(found, str):
        raise KernelError(f"kernel 'cpu' cannot run: {found}; or use kernel='xla', which needs nothing")
    return found


@cache
def _targets_or_problem(flags: tuple[str, ...]) -> dict[str, str] | str:
    try:
        path = _built(flags)
        library = ctypes.CDLL(str(path))
    except (NoLibraryError, OSError, ImportError) as error:
        logger.info("no attention kernel of this CPU's own: %s", error)
        return str(error)
    names = {}
    for target in TARGETS:
        names[target] = f"ringjax_attention_{target}_{path.stem}"
        function = getattr(library, f"ringjax_attention_{target}")
        jax.ffi.register_ffi_target(names[target], jax.ffi.pycapsule(function), platform="cpu")
    return names


def _built(flags: tuple[str, ...]) -> Path:
    """The compiled library, from the cache if it is there."""
    if os.name != "posix":
        raise NoLibraryError("it is compiled on Linux and macOS only")
    compiler = _compiler()
    options = (*OPTIONS, *flags)
    folder = _folder()
    path = folder / f"{_key(compiler, options)}.so"
    if not path.exists():
        # Processes that start together wait for the one that compiles.
        with _locked(folder / "lock"):
            if not path.exists():
                _compile(compiler, options, path)
    return path


def _compiler() -> str:
    """What compiles C++ here."""
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["c++", "g++", "clang++"]:
        if found := shutil.which(name):
            return found
    what = f"CXX={asked} is not there" if asked else "there is no C++ compiler (c++, g++ or clang++)"
    raise NoLibraryError(f"{what}: install one, or set CXX to one of GCC 9 or Clang 12 or later")


def _folder() -> Path:
    """Where compiled code is kept: a folder that nobody else can write to."""
    asked = os.environ.get("RINGJAX_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(asked or Path(base, "ringjax")).expanduser() / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        raise NoLibraryError(f"there is no place for compiled code ({error}): set RINGJAX_CACHE_DIR") from error
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if others or found.st_uid != os.getuid():
        raise NoLibraryError(
            f"{folder} belongs to another user or can be written by others, and code from there could be anybody's: "
            f"make it yours alone (chmod 700), or set RINGJAX_CACHE_DIR"
        )
    return folder


def _key(compiler: str, options: tuple[str, ...]) -> str:
    """A name for all that the compiled code depends on."""
    parts = [compiler, _output([compiler, "--version"]), *options, version("jaxlib"), platform.machine(), _cpu()]
    parts += [file.read_text("utf-8") for file in sorted(SOURCE.iterdir()) if file.suffix in (".cc", ".h")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """What the CPU can do, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NoLibraryError(f"the C++ compiler does not run ({error}): set CXX to one that does") from error


def _compile(compiler: str, options: tuple[str, ...], path: Path) -> None:
    """Write the library to `path`, complete or not at all."""
    logger.info("compiling the attention kernel for this CPU with %s: once, up to 20 s", compiler)
    start = time.perf_counter()
    handle, scratch = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    headers = ("-isystem", jax.ffi.include_dir())
    command = [compiler, *options, *headers, "-o", scratch, str(SOURCE / "attention.cc")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_COMPILATION)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:300])
            raise NoLibraryError(f"{compiler} does not compile it ({first}): set CXX to GCC 9 or Clang 12 or later")
        os.replace(scratch, path)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoLibraryError(f"compiling it failed ({error}): set CXX to another compiler") from error
    finally:
        Path(scratch).unlink(missing_ok=True)
    logger.info("compiled the attention kernel in %.1f s, kept as %s", time.perf_counter() - start, path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file's lock; it goes with the process that has it."""
    import fcntl  # not on every system

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
