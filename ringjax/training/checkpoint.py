"""Checkpoints that are whole or do not count: Orbax stores the arrays, a manifest of digests vouches for them.

A step is written into `<step>.partial`, gets its manifest there, and is then renamed to `<step>`. So a kill
leaves a whole checkpoint or a partial folder, which nothing reads and the next save removes. Orbax does not
notice changed bits in its files; the manifest does, before anything is restored.
"""

import functools
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from ringjax.config import UserError

_FORMAT = 1
_MANIFEST = "manifest.json"
_ARRAYS = "arrays"
_PARTIAL = ".partial"
_NONE = -1  # no step
_DISCARD_TRIES, _DISCARD_PAUSE_S = 20, 0.05

_log = logging.getLogger(__name__)


class CheckpointError(UserError):
    """A checkpoint could not be written, or none fits what was asked for."""


def finished_steps(folder: Path) -> list[int]:
    """The steps that have a finished checkpoint in a folder, whole or damaged since, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


class Checkpoints:
    """The checkpoints of one run, `folder/<step>/`.

    Every process of a multi-host run makes the same calls on one shared folder. A save goes on in the background;
    if it fails, the next call of any method but `steps` raises. Use it as a context manager, or call `close`.

    Args:
      folder: where the steps are; made by the first save.
      keep: newest checkpoints that are kept; older ones are deleted after a save has succeeded.

    Example:
      >>> import tempfile
      >>> state = {"w": jax.numpy.arange(4.0)}
      >>> with tempfile.TemporaryDirectory() as folder, Checkpoints(Path(folder), keep=2) as checkpoints:
      ...     checkpoints.save(100, state)
      ...     step, restored = checkpoints.restore(
      ...         jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
      ...     )
      >>> step
      100
    """

    def __init__(self, folder: Path, keep: int):
        assert keep >= 1
        self._folder = folder.absolute()
        self._keep = keep
        self._current: int | None = None  # the step that this object last saved or restored
        self._damaged: set[int] = set()
        self._pending: Future[None] | None = None
        self._failed: Path | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        logging.getLogger("absl").addFilter(_not_orbax)
        _quiet_failed_saves()
        # Folders are made in the foreground: if that fails in the background, Orbax's threads wait for minutes.
        self._orbax = ocp.StandardCheckpointer(
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False)
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The steps that have a finished checkpoint, oldest first. Damage is found by `restore` only."""
        return finished_steps(self._folder)

    def exist(self) -> bool:
        """Whether there are finished checkpoints; the same for all processes."""
        return bool(_from_first(len(self.steps())))

    def save(self, step: int, state: Any, wait: bool = False) -> None:
        """Save the state of a step; once this returns, its buffers may be donated.

        Saving the step that was just saved or restored does nothing; another checkpoint of the step is replaced.

        Args:
          step: optimizer steps done.
          state: pytree of jax.Array.
          wait: return only when the checkpoint is on disk.

        Raises:
          CheckpointError: this save, or the one before it, could not be written.
        """
        self.wait()
        if step == self._current:
            return
        arrays, _ = _by_name(state)
        partial = self._folder / f"{_name(step)}{_PARTIAL}"
        needed = sum(array.nbytes for array in arrays.values())
        with self._explained(step, partial, needed):
            if jax.process_index() == 0:
                self._folder.mkdir(parents=True, exist_ok=True)
                for leftover in self._folder.glob(f"*{_PARTIAL}"):
                    shutil.rmtree(leftover)
            self._orbax.save(partial / _ARRAYS, arrays)
        described = {name: [str(array.dtype), list(array.shape)] for name, array in arrays.items()}
        self._pending = self._thread.submit(self._finish, step, partial, needed, described)
        if wait:
            self.wait()

    def check(self) -> None:
        """Raise if the save in the background has failed; never waits. Cheap enough for every step."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the save in the background is on disk.

        Raises:
          CheckpointError: it could not be written.
        """
        if self._pending is None:
            return
        try:
            self._pending.result()
        finally:
            if self._pending.done():
                self._pending = None

    def restore(self, abstract: Any, step: int | None = None) -> tuple[int, Any]:
        """Load a checkpoint straight onto the given shardings, bit for bit, whatever mesh it was saved on.

        Damaged checkpoints are passed over with one warning and left where they are.

        Args:
          abstract: pytree of jax.ShapeDtypeStruct with shardings: the structure of the state that is wanted.
          step: the one to load; None = the newest that is whole.

        Returns:
          (step, state).

        Raises:
          CheckpointError: there is no whole checkpoint, or its arrays are not the ones wanted.
        """
        self.wait()
        if jax.process_index() == 0:
            try:
                found, described = self._choose(step)
            except BaseException:
                _from_first(_NONE)
                raise
            _from_first(found)
        else:
            found = _from_first(_NONE)  # the first process has read all files, and once is enough
            if found == _NONE:
                raise CheckpointError(f"the first process can restore nothing from {self._folder}; its log says why")
            described = _described(self._folder / _name(found))
        path = self._folder / _name(found)
        target, structure = _by_name(abstract)
        _require_same(path, target, described)
        arrays = self._orbax.restore(path / _ARRAYS, target)
        self._current = found
        return found, jax.tree.unflatten(structure, [arrays[name] for name in target])

    def close(self) -> None:
        """Wait for the save in the background and let go of all threads."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._orbax.close()
            if self._failed is not None:  # a late write makes its folder again
                _discard(self._failed)
            logging.getLogger("absl").removeFilter(_not_orbax)

    def _finish(self, step: int, partial: Path, needed: int, described: dict[str, list]) -> None:
        """In the background: vouch for the files Orbax has written, give them their name, drop old steps."""
        with self._explained(step, partial, needed):
            self._orbax.wait_until_finished()
            if jax.process_index() == 0:
                _write_manifest(partial, step, described)
                final = self._folder / _name(step)
                if final.exists():
                    _remove(final)
                partial.rename(final)
                _sync(self._folder)
        self._damaged.discard(step)
        self._current = step
        if jax.process_index() == 0:
            others = [other for other in self.steps() if other != step and other not in self._damaged]
            for old in others[: max(0, len(others) - self._keep + 1)]:
                _remove(self._folder / _name(old))

    def _choose(self, step: int | None) -> tuple[int, dict[str, list]]:
        """The step to restore and its arrays, after its files have been compared with their digests."""
        present = self.steps()
        if step is not None and step not in present:
            raise CheckpointError(f"{self._folder} has no checkpoint of step {step}; it has {present or 'none'}")
        reasons = []
        for candidate in reversed(present) if step is None else [step]:
            try:
                described = _verified_arrays(self._folder / _name(candidate), candidate)
            except _DamageError as damage:
                self._damaged.add(candidate)
                reasons.append(f"the checkpoint of step {candidate} in {self._folder} is damaged: {damage}")
                continue
            if reasons:
                _log.warning("%s; using step %d instead", "; ".join(reasons), candidate)
            return candidate, described
        if not reasons:
            raise CheckpointError(f"there is no checkpoint in {self._folder}")
        advice = "restore the files from a copy, or start over in another run.dir"
        raise CheckpointError(f"no whole checkpoint: {'; '.join(reasons)}. To go on, {advice}")

    @contextmanager
    def _explained(self, step: int, partial: Path, needed: int) -> Iterator[None]:
        """Clear away the unfinished checkpoint on failure, and say what the disk or folder lacks."""
        try:
            yield
        except Exception as error:
            _discard(partial)
            self._failed = partial
            reason = _system_reason(error)
            if reason is None:
                raise
            existing = next(path for path in [self._folder, *self._folder.parents] if path.exists())
            free = shutil.disk_usage(existing).free
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self._folder}: {reason}. It needs about"
                f" {needed:,} bytes and {free:,} are free. Earlier checkpoints are as they were. Make room or use a"
                " run.dir that can be written, then run the same command again"
            ) from error


class _DamageError(Exception):
    """Why a checkpoint on disk does not count."""


def _from_first(number: int) -> int:
    """What the first process says; in a run of one process that is what is given."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def _described(folder: Path) -> dict[str, list]:
    """The arrays that the manifest of a whole checkpoint lists."""
    return json.loads((folder / _MANIFEST).read_bytes())["content"]["arrays"]


def _name(step: int) -> str:
    """The folder of a step; padded, so that listings are in order."""
    return f"{step:08d}"


def _by_name(tree: Any) -> tuple[dict[str, Any], Any]:
    """Leaves by path, such as params/blocks/kernel, and the structure to put them back into."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves of the state have one name"
    return named, structure


def _require_same(path: Path, target: dict[str, Any], described: dict[str, list]) -> None:
    """Refuse a checkpoint whose arrays differ in name, dtype or shape from those wanted."""
    wanted = {name: _spec(str(leaf.dtype), leaf.shape) for name, leaf in target.items()}
    found = {name: _spec(*spec) for name, spec in described.items()}
    differing = [name for name in [*wanted, *found] if wanted.get(name) != found.get(name)]
    if differing:
        name = differing[0]
        more = len(set(differing)) - 1
        raise CheckpointError(
            f"checkpoint {path} does not fit this run: {name} is required as {wanted.get(name, 'nothing')} and"
            f" stored as {found.get(name, 'nothing')}{f' ({more} more differ)' if more else ''}; restore the"
            " settings it was saved with, or use another run.dir"
        )


def _spec(dtype: str, shape: Any) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _write_manifest(folder: Path, step: int, described: dict[str, list]) -> None:
    """Record size and digest of every file, flushed to disk so that a power failure is no worse than a kill."""
    files = {}
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "blake2b").hexdigest()
            files[path.relative_to(folder).as_posix()] = [os.fstat(file.fileno()).st_size, digest]
    content = {"format": _FORMAT, "step": step, "arrays": described, "files": files}
    with (folder / _MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({"digest": _content_digest(content), "content": content}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _verified_arrays(folder: Path, step: int) -> dict[str, list]:
    """What the manifest says of the arrays, once every file has been found to be as it was written."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        content = manifest["content"]
        genuine = _content_digest(content) == manifest["digest"] and content["step"] == step
    except FileNotFoundError:
        raise _DamageError(f"{_MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _DamageError(f"{_MANIFEST} cannot be read ({error})") from None
    if not genuine:
        raise _DamageError(f"{_MANIFEST} has changed since it was written")
    if content["format"] != _FORMAT:
        raise CheckpointError(
            f"checkpoint {folder} has format {content['format']}, this version reads {_FORMAT}; use the version of"
            " ringjax that wrote it"
        )
    present = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
    for name, (size, digest) in content["files"].items():
        if name not in present:
            raise _DamageError(f"{name} is missing")
        found = present[name].stat().st_size
        if found != size:
            raise _DamageError(f"{name} has {found:,} bytes instead of {size:,}")
        try:
            with present[name].open("rb") as file:
                same = hashlib.file_digest(file, "blake2b").hexdigest() == digest
        except OSError as error:
            raise _DamageError(f"{name} cannot be read ({error.strerror})") from None
        if not same:
            raise _DamageError(f"{name} has changed since it was written")
    return content["arrays"]


def _content_digest(content: dict) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _remove(folder: Path) -> None:
    """Delete a checkpoint such that a kill half-way leaves a partial folder, never half a checkpoint."""
    condemned = folder.with_name(folder.name + ".old" + _PARTIAL)
    folder.rename(condemned)
    shutil.rmtree(condemned, ignore_errors=True)


def _discard(partial: Path) -> None:
    """Delete what a failed save has written, while its last writes may still be under way."""
    for _ in range(_DISCARD_TRIES):
        shutil.rmtree(partial, ignore_errors=True)
        if not partial.exists():
            return
        time.sleep(_DISCARD_PAUSE_S)


def _sync(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _system_reason(error: Exception) -> str | None:
    """What the operating system said, if that is why a write failed."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # Tensorstore, which writes Orbax's arrays, raises ValueError with the number in its text.
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(code[1])) if code else None


@functools.cache
def _quiet_failed_saves() -> None:
    """Once and for good: what is left of a failed save complains whenever it is noticed, even after `close`."""
    logging.getLogger("asyncio").addFilter(_not_tensorstore)
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        # Tensorstore tells Orbax of its other writes, on an event loop that Orbax has closed.
        if unraisable.object is not None or str(unraisable.exc_value) != "Event loop is closed":
            previous(unraisable)

    sys.unraisablehook = hook


def _not_tensorstore(record: logging.LogRecord) -> bool:
    """Filter: of a failed save's many writes Orbax raises the first error; asyncio logs the others."""
    return not (record.exc_info and "os_error_code=" in str(record.exc_info[1]))


def _not_orbax(record: logging.LogRecord) -> bool:
    """Filter: Orbax prints, for each of its threads, an exception that it then raises to us as well."""
    return not (record.exc_info and "orbax" in record.pathname)
