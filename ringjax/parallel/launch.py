"""Several processes of one run on this machine, each with its share of virtual CPU devices: a cluster to try out."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager, suppress

_PAUSE_S = 0.1
_PATIENCE_S = 30.0  # for the other processes when one has failed
_PROGRAM = "import sys; from ringjax.cli import main; sys.exit(main())"


def launch_local(arguments: Sequence[str], count: int) -> int:
    """Run `ringjax train` with these arguments in `count` processes that find each other on the loopback interface.

    What the processes print goes where this one prints; only the first has something to say when all is well. SIGTERM
    and Ctrl-C are passed on. If one process fails, the others are ended.

    Args:
      arguments: settings file and overrides, without any of `processes`.
      count: processes.

    Returns:
      The exit status of the first process that failed, else 0; for one ended by a signal, 128 and its number.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    shared = [f"processes.count={count}", f"processes.coordinator={coordinator}"]
    processes = [
        subprocess.Popen([sys.executable, "-c", _PROGRAM, "train", *arguments, *shared, f"processes.index={index}"])
        for index in range(count)
    ]
    try:
        with _passing_on(processes):
            return _wait(processes)
    finally:
        for process in processes:
            process.kill()  # does nothing to those that have ended
            process.wait()


def _wait(processes: Sequence[subprocess.Popen]) -> int:
    """Until all have ended, or one has failed and the others have been given their time."""
    while (states := [process.poll() for process in processes]).count(None):
        failed = [index for index, state in enumerate(states) if state]
        if failed:
            return _end_others(processes, failed[0])
        time.sleep(_PAUSE_S)
    failed = [index for index, state in enumerate(states) if state]
    return _status(processes, failed[0]) if failed else 0


def _end_others(processes: Sequence[subprocess.Popen], failed: int) -> int:
    """Let the others end by themselves, as they do when all of them stop, or end them."""
    status = _status(processes, failed)
    deadline = time.monotonic() + _PATIENCE_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    if any(process.poll() is None for process in processes):
        print("ending the others", file=sys.stderr)
    return status


def _status(processes: Sequence[subprocess.Popen], index: int) -> int:
    """The exit status of a process, as a shell would give it; a violent end is told."""
    status = processes[index].returncode
    if status >= 0:
        return status
    name = signal.Signals(-status).name
    print(
        f"process {index} was ended by {name}; the same command continues from the last checkpoint", file=sys.stderr
    )
    return 128 - status


@contextmanager
def _passing_on(processes: Sequence[subprocess.Popen]):
    """While entered, signals to this process go to all of them."""

    def pass_on(number: int, _) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
