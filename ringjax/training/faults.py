"""Stopping on request: SIGTERM from a scheduler, Ctrl-C from a person."""

import os
import signal
import threading
from contextlib import suppress
from types import FrameType

_STDERR = 2
EXIT_AGAIN = 75  # EX_TEMPFAIL: run me again
_EXIT_STATUS = {"SIGTERM": EXIT_AGAIN, "SIGINT": 130}
_MESSAGE = "\n{}: finishing this step, saving, then stopping; press Ctrl-C{} to stop at once\n"


class StopSignals:
    """While entered, SIGTERM and SIGINT ask for a stop instead of ending the process.

    The first one sets `requested` and says so on standard error; the loop looks at `requested` between steps. A
    SIGINT after that raises KeyboardInterrupt; further SIGTERMs change nothing. Python only lets the main thread
    handle signals: entered in another thread (some notebooks), this does nothing.

    Attributes:
      requested: name of the first signal received, or None.

    Example:
      >>> with StopSignals() as stop:
      ...     while not stop.requested:
      ...         os.kill(os.getpid(), signal.SIGTERM)  # where a program would do its next piece of work
      >>> stop.exit_status
      75
    """

    def __init__(self):
        self.requested: str | None = None
        self._previous = {}

    @property
    def exit_status(self) -> int:
        """75 after SIGTERM (EX_TEMPFAIL: run me again), 130 after SIGINT, else 0."""
        return _EXIT_STATUS[self.requested] if self.requested else 0

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for name in _EXIT_STATUS:
                number = signal.Signals[name]
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not installed from Python and cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested is None:
            self.requested = name
            # Not print: a handler may interrupt another print, whose buffer cannot be entered twice.
            with suppress(OSError):
                os.write(_STDERR, _MESSAGE.format(name, " again" if name == "SIGINT" else "").encode())
        elif name == "SIGINT":
            raise KeyboardInterrupt
