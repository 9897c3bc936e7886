"""The numbers of a run on disk: metrics.jsonl, which is the record, and TensorBoard events beside it."""

import json
import logging
import math
import numbers
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboardX import RecordWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from ringjax.config import UserError

_log = logging.getLogger(__name__)


class MetricsError(UserError):
    """metrics.jsonl cannot be written."""


class MetricsLog:
    """Appends one JSON object per reported step, and the same numbers as TensorBoard scalars.

    Every line is on its way to the disk before the call returns. JSON has no NaN and no infinity: they are written
    as null. A TensorBoard writer that fails is switched off with one warning and never stops the run.

    Args:
      path: metrics.jsonl; made if missing.
      tensorboard: folder of TensorBoard events; made if missing.
      resume_step: the step this run goes on from. Records of later steps, left by a run that was cut off, are
        dropped, and so is a line that it did not finish; TensorBoard hides its later points.

    Raises:
      MetricsError: the file cannot be written (here and in `train` and `eval`).
    """

    def __init__(self, path: Path, tensorboard: Path, resume_step: int = 0):
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _drop_after(path, resume_step)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from error
        self._events = _Events(tensorboard, resume_step)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def train(
        self, step: int, *, loss: float, grad_norm: float, lr: float, tokens: int, tokens_per_s: float, **more: Any
    ) -> None:
        """Record a training step.

        Args:
          step: optimizer steps done.
          loss: nats per token.
          grad_norm: before clipping.
          lr: learning rate of this step.
          tokens: tokens seen since the start of training.
          tokens_per_s: over all devices.
          **more: further numbers, recorded by their names.
        """
        values = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens": tokens, "tokens_per_s": tokens_per_s}
        values |= more
        self._append(step, values)
        self._events.write(step, {f"train/{name}": value for name, value in values.items()})

    def eval(self, step: int, *, eval_loss: float, **more: Any) -> None:
        """Record an evaluation: the held-out loss in nats per token, and further numbers by their names."""
        self._append(step, {"eval_loss": eval_loss, **more})
        self._events.write(step, {"eval/loss": eval_loss} | {f"eval/{name}": value for name, value in more.items()})

    def close(self) -> None:
        """Close both files. Nothing is pending: each call has written what it was given."""
        self._file.close()
        self._events.close()

    def _append(self, step: int, values: dict[str, Any]) -> None:
        record = {"step": int(step)} | {name: _plain(value) for name, value in values.items()}
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # closing tries the same write again, and must not hide this error
                self._file.close()
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> MetricsError:
        return MetricsError(
            f"{self._path} must be a file that can be written: {error.strerror or error}. Make room or change its"
            " permissions, then run the same command again"
        )


class _Events:
    """TensorBoard scalars, written in the foreground: the library's queue blocks for good once its thread died."""

    def __init__(self, folder: Path, resume_step: int):
        self._folder = folder
        self._writer: RecordWriter | None = None
        self._guarded(lambda: self._open(resume_step))

    def write(self, step: int, values: dict[str, Any]) -> None:
        scalars = {tag: float(value) for tag, value in values.items() if isinstance(value, numbers.Real)}
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=scalars[tag]) for tag in scalars])
        self._guarded(lambda: self._put(Event(wall_time=time.time(), step=step, summary=summary)))

    def close(self) -> None:
        self._guarded(lambda: self._writer and self._writer.close())
        self._writer = None

    def _open(self, resume_step: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names; a second may see more than one start of a run.
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{time.time_ns() % 10**9:09d}.{os.getpid()}"
        self._writer = RecordWriter(str(self._folder / name))
        self._put(Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)
        self._put(Event(wall_time=time.time(), step=resume_step + 1, session_log=start))

    def _put(self, event: Event) -> None:
        if self._writer is not None:
            self._writer.write(event.SerializeToString())
            self._writer.flush()

    def _guarded(self, action: Callable[[], object]) -> None:
        """Do it, or give TensorBoard up. Whatever it raises: a tracker is never worth a run."""
        try:
            action()
        except Exception as error:
            self._writer = None
            _log.warning("no more TensorBoard events in %s: %s; metrics.jsonl goes on", self._folder, error)


def _plain(value: Any) -> Any:
    """As JSON has it: text, truth values and integers as they are, other numbers as floats, null if not finite."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def _drop_after(path: Path, step: int) -> None:
    """Take out later records and torn lines, by way of a second file, so that a kill loses nothing."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and _step(line) <= step]
    if kept == lines:
        return
    partial = path.with_suffix(".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _step(line: str) -> float:
    """The step of a record; infinite if the line is not a record."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step if isinstance(step, int) else math.inf
