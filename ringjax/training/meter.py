"""How fast a run goes, and what memory its program takes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Pace:
    """Means over the steps of one report.

    Attributes:
      step_s: seconds per step.
      data_wait_s: the part of it spent waiting for the batch.
    """

    step_s: float
    data_wait_s: float


class Meter:
    """Measures the time from one finished step to the next, without what is not training.

    Compilation, evaluations and checkpoints run under `paused`.
    """

    def __init__(self):
        self._mark: float | None = None
        self._steps = 0
        self._seconds = 0.0
        self._waited = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what happens inside. Time before the first pause is left out too."""
        try:
            yield
        finally:
            self._mark = time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what happens inside as waiting for data."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - start

    def step(self) -> None:
        """A step is finished."""
        now = time.perf_counter()
        if self._mark is not None:
            self._seconds += now - self._mark
        self._steps += 1
        self._mark = now

    def take(self) -> Pace:
        """The means since the last call; starts anew."""
        steps = max(self._steps, 1)
        pace = Pace(max(self._seconds, 1e-9) / steps, self._waited / steps)
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0
        return pace


def device_memory(program: jax.stages.Compiled) -> int | None:
    """Bytes that the fullest device needs: its measured peak, or else what the compiled program reserves.

    CPU devices measure nothing; the compiler's plan stands in for them.
    """
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    if measured := [peak for peak in peaks if peak is not None]:
        return max(measured)
    plan = program.memory_analysis()
    if plan is None:
        return None
    return (
        plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes - plan.alias_size_in_bytes
    )
