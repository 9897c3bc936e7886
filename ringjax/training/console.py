"""What a person sees: a table at the start, then one live bar on a terminal and plain lines elsewhere."""

import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

import rich.console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

_BAR_WIDTH = 12


@dataclass(frozen=True)
class StepReport:
    """The key figures of a training step.

    Attributes:
      loss: nats per token.
      lr: learning rate.
      grad_norm: global norm of the gradient, before clipping.
      tokens_per_s: over all devices.
      tokens_per_s_device: of one device.
      step_s: seconds per step.
      data_wait_s: seconds of a step spent waiting for data.
      mfu: model FLOPs over peak FLOPs, 0 to 1; None where the peak is unknown.
      memory: bytes in use on the fullest device; None where unknown.
      eta_s: seconds until the last step; None while unknown, 0 at the last.
    """

    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    tokens_per_s_device: float
    step_s: float
    data_wait_s: float
    mfu: float | None = None
    memory: int | None = None
    eta_s: float | None = None

    def __str__(self) -> str:
        return "  ".join([*self._figures(), *self._eta()])

    def eta_first(self) -> str:
        """The same with the ETA at the start, where a narrow terminal does not cut it off."""
        return "  ".join([*self._eta(), *self._figures()])

    def _eta(self) -> list[str]:
        return [] if not self.eta_s else [f"eta {format_seconds(self.eta_s)}"]

    def _figures(self) -> list[str]:
        parts = [
            f"loss {self.loss:.3f}",
            f"lr {self.lr:.1e}",
            f"grad {self.grad_norm:.2f}",
            f"{format_count(self.tokens_per_s)} tok/s ({format_count(self.tokens_per_s_device)}/device)",
            f"{format_seconds(self.step_s)}/step",
            f"data {format_seconds(self.data_wait_s)}",
        ]
        if self.mfu is not None:
            parts.append(f"mfu {self.mfu:.1%}")
        if self.memory is not None:
            parts.append(f"mem {format_bytes(self.memory)}")
        return parts


class Console:
    """Writes to a person. On a terminal with a live bar; into files, pipes and notebooks as plain, unbroken lines.

    Args:
      file: where to; None = standard output.

    Example:
      >>> console = Console(sys.stdout)
      >>> console.table([("model", "4 layers"), ("mesh", "seq 4")])
      model  4 layers
      mesh   seq 4
      >>> console.evaluation(10, 2.81, unit="nats/byte")
      eval step 10  loss 2.810 nats/byte
    """

    def __init__(self, file: TextIO | None = None):
        file = sys.stdout if file is None else file
        # A process started without a standard output has None there.
        self._file: TextIO = open(os.devnull, "w", encoding="utf-8") if file is None else file  # noqa: SIM115
        self._rich: rich.console.Console | None = None
        if self._file.isatty():
            terminal = rich.console.Console(file=self._file, highlight=False, markup=False, emoji=False)
            # A dumb terminal cannot go back to the start of a line, so a bar would fill the screen.
            self._rich = None if terminal.is_dumb_terminal else terminal

    @classmethod
    def silent(cls) -> "Console":
        """One that nobody reads: of a run of several processes only the first speaks."""
        return cls(open(os.devnull, "w", encoding="utf-8"))

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print names and what they are, in two columns."""
        if self._rich is not None:
            table = Table.grid(padding=(0, 2))
            for name, value in rows:
                table.add_row(Text(name, style="bold"), Text(value))
            self._rich.print(table)
            return
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self.line(f"{name:<{width}}  {value}")

    def line(self, text: str) -> None:
        """Print text, above the bar if there is one."""
        if self._rich is not None:
            self._rich.print(Text(text))
            return
        try:
            print(text, file=self._file, flush=True)
        except BrokenPipeError:
            # Nobody reads any more (`| head`): that is no reason to stop training. What is buffered goes nowhere
            # too, or Python would complain of it at exit.
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, self._file.fileno())
            os.close(silence)

    def evaluation(self, step: int, loss: float, unit: str) -> None:
        """Print a held-out loss, such as `eval step 50  loss 2.810 nats/byte`."""
        self.line(f"eval step {step}  loss {loss:.3f} {unit}")

    @contextmanager
    def progress(self, total: int, start: int) -> Iterator["Reporter"]:
        """Show the way from step `start` to step `total`.

        Args:
          total: the last step.
          start: steps done before.

        Returns:
          A context whose value takes the reports.
        """
        if self._rich is None:
            yield _Lines(self, total)
            return
        with Progress(
            # A narrow terminal cuts the figures, never the step or the bar.
            TextColumn("step {task.completed}/{task.total}", table_column=_fixed(len(f"step {total}/{total}"))),
            BarColumn(bar_width=_BAR_WIDTH, table_column=_fixed(_BAR_WIDTH)),
            TextColumn("{task.fields[figures]}", markup=False),
            console=self._rich,
            refresh_per_second=4,
            # Standard error sent elsewhere must arrive there.
            redirect_stderr=sys.stderr.isatty(),
        ) as progress:
            yield _Bar(progress, total, start)


class Reporter(ABC):
    """Takes reports of training and shows them."""

    @abstractmethod
    def advance(self, step: int) -> None:
        """Say that a step is done, without figures."""

    @abstractmethod
    def report(self, step: int, figures: StepReport) -> None:
        """Show the figures of a step."""


class _Lines(Reporter):
    """One plain line per report."""

    def __init__(self, console: Console, total: int):
        self._console = console
        self._total = total

    def advance(self, step: int) -> None:
        pass

    def report(self, step: int, figures: StepReport) -> None:
        self._console.line(f"step {step}/{self._total}  {figures}")


class _Bar(Reporter):
    """One live line on a terminal."""

    def __init__(self, progress: Progress, total: int, start: int):
        self._progress = progress
        self._task = progress.add_task("", total=total, completed=start, figures="compiling")

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def report(self, step: int, figures: StepReport) -> None:
        self._progress.update(self._task, completed=step, figures=figures.eta_first())


def _fixed(width: int) -> Column:
    return Column(no_wrap=True, min_width=width, max_width=width)


def format_count(count: float) -> str:
    """A count in three digits: 950, 12.3k, 1.23M, 7B, 2.5T."""
    return _scaled(count, ["", "k", "M", "B", "T"])


def plural(count: int, noun: str) -> str:
    """A count with its noun: 1 layer, 2 layers."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_bytes(count: float) -> str:
    """Bytes in three digits, in powers of 1000: 512 MB, 1.5 GB."""
    return _scaled(count, [" B", " kB", " MB", " GB", " TB", " PB"])


def format_seconds(seconds: float) -> str:
    """A duration: 3 ms, 0.33 s, 12.5 s, 1m02s, 3h05m, 2d04h."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def _scaled(value: float, units: Sequence[str]) -> str:
    """Three significant digits and the unit that needs at most three before the point; no zeros at the end."""
    if not math.isfinite(value):
        return f"?{units[0]}"
    for unit in units[:-1]:
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}{units[-1]}" if abs(value) < 999.5 else f"{value:,.0f}{units[-1]}"
