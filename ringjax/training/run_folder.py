"""The run folder: everything a run writes, held by one process, with one configuration."""

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from ringjax.config import Config, ConfigError, UserError, dump_config, load_config
from ringjax.config.dialect import shown
from ringjax.training.checkpoint import finished_steps

_PROBE_BYTES = 1 << 16
# What file systems without locks answer, such as Lustre mounted without flock: runs in them are not kept apart.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunFolderError(UserError):
    """The run folder cannot be used as it is."""


class RunFolder:
    """Makes a run folder ready, or says what is in the way, before any work is done.

    It is created if need be, shown to be writable, and locked until `close`, so that no other process writes it.
    Use it as a context manager.

    Args:
      path: the folder (`run.dir`).
      leads: whether this process writes it: of a run of several processes only the first does. The others get to
        know where things are.

    Attributes:
      path: the folder.
      config: config.yaml, the resolved settings.
      metrics: metrics.jsonl, one object per reported step.
      checkpoints: folder of checkpoints.
      tensorboard: folder of TensorBoard events.
      log: log.txt, the run's log.

    Raises:
      RunFolderError: it is not a folder, cannot be written, or another process holds it. Nothing is left behind.
    """

    def __init__(self, path: str | Path, leads: bool = True):
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.log = self.path / "log.txt"
        self.leads = leads
        self._lock: int | None = None
        if not leads:
            return
        made = _make(self.path)
        try:
            self._lock = _lock(self.path / ".lock")
            _probe(self.path / ".probe")
        except RunFolderError:
            self.close()
            if made:
                (self.path / ".lock").unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()
            raise

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes use the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def adopt(self, config: Config) -> None:
        """Write the settings of this run, unless a run in here went on with others that decide its numbers.

        With checkpoints in the folder, model, data, optim, run.seed, train.precision and train.rounds must be what
        they were; mesh, attention, the rest of train and where it runs may change.

        Raises:
          RunFolderError: they differ (each key is listed, old and new), or config.yaml cannot be read or written.
        """
        if not self.leads:
            return
        for folder in (self.checkpoints, self.tensorboard):
            if folder.exists() and not folder.is_dir():
                raise RunFolderError(f"{folder} must be a folder, and is a file. Remove it or use another run.dir")
        if finished_steps(self.checkpoints):
            self._refuse_changes(config)
        partial = self.config.with_suffix(".partial")
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(dump_config(config))
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.config)
        except OSError as error:
            partial.unlink(missing_ok=True)
            _refuse(self.path, error)

    def _refuse_changes(self, config: Config) -> None:
        if not self.config.exists():
            raise RunFolderError(
                f"{self.path} holds checkpoints, but {self.config.name} with the settings they were made with is "
                "gone, so that a change of settings could not be seen. Put the file back, or use another run.dir"
            )
        try:
            earlier = load_config(self.config)
        except ConfigError as error:
            raise RunFolderError(
                f"{self.config}, the settings of the run in this folder, cannot be read:\n{error}\n"
                "Put the file back as it was, or use another run.dir"
            ) from error
        old, new = dict(_deciding(earlier)), dict(_deciding(config))
        changed = [f"  {key}: {shown(old[key])} -> {shown(new[key])}" for key in new if old[key] != new[key]]
        if changed:
            raise RunFolderError(
                f"{self.path} holds a run with other settings, which this one cannot continue (old -> new):\n"
                + "\n".join(changed)
                + "\nUse another run.dir, or put these settings back"
            )


# How much is computed at a time, and how often a run is measured: what is computed stays the same.
_FREE = {"model.mlp_chunk", "model.loss_chunk", "optim.accumulate", "data.eval_batches"}


def _deciding(config: Config) -> Iterator[tuple[str, Any]]:
    """The settings that decide the numbers of a run, by key path."""
    for section in ("model", "data", "optim"):
        for key, value in config.model_dump()[section].items():
            if f"{section}.{key}" not in _FREE:
                yield f"{section}.{key}", value
    yield "run.seed", config.run.seed
    yield "train.precision", config.train.precision
    yield "train.rounds", config.train.rounds  # not the numbers, but how checkpoints hold them


def _make(path: Path) -> list[Path]:
    """Create the folder and those above it; the ones that were missing, innermost first."""
    try:
        missing = [folder for folder in [path, *path.parents] if not folder.exists()]
        for folder in [path, *path.parents]:
            if folder.is_file():
                raise RunFolderError(
                    f"run.dir must be a folder; {folder} is a file. Remove it or use another run.dir"
                )
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _refuse(path, error)
    return missing


def _lock(path: Path) -> int:
    """Take the folder's lock, which the system lets go of however the process ends; the open file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        _refuse(path.parent, error)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 64).decode(errors="replace").strip()
        os.close(descriptor)
        who = f"another process (id {holder})" if holder else "another process"
        raise RunFolderError(
            f"{path.parent} is in use by {who}. Wait for it, stop it, or use another run.dir"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(descriptor)
            _refuse(path.parent, error)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    except OSError as error:
        os.close(descriptor)
        _refuse(path.parent, error)
    return descriptor


def _probe(path: Path) -> None:
    """Write a little: a full or read-only disk shows itself now and not after an hour of compilation."""
    try:
        with path.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        _refuse(path.parent, error)
    finally:
        path.unlink(missing_ok=True)


def _refuse(path: Path, error: OSError) -> NoReturn:
    raise RunFolderError(
        f"run.dir must be a folder that can be written; {path}: {error.strerror or error}. Make room or change its"
        " permissions, or use another run.dir"
    ) from error
