"""Something to see while something takes long."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import rich.console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_EVERY_S = 15.0


@contextmanager
def shown(what: str) -> Iterator[None]:
    """While entered, show on stderr that work goes on: one live line on a terminal, elsewhere one now and then."""
    console = rich.console.Console(stderr=True)
    if console.is_terminal:
        with Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
        ) as progress:
            progress.add_task(what, total=None)
            yield
        return
    done, started = threading.Event(), time.monotonic()

    def report() -> None:
        print(f"{what} ...", file=sys.stderr, flush=True)
        while not done.wait(_EVERY_S):
            print(f"{what} ... {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
