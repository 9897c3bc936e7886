"""Several processes as one run: a roll call, then `jax.distributed`.

Process 0 first asks all of them to report with their settings. jax alone would end a process whose peers are missing
or differ without saying which ones.
"""

import json
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax

from ringjax.config import Config, ProcessesConfig
from ringjax.parallel.clusters import ProcessesError, find_processes

_PAUSE_S = 0.2  # between two tries to reach process 0
_PATIENCE_S = 10.0  # for a process that has reached process 0 to say who it is
_LONGEST = 1 << 20  # bytes of a report: settings are a few kilobytes


@dataclass(frozen=True)
class _Report:
    """What a process says of itself."""

    index: int
    host: str
    settings: dict[str, Any]

    def __str__(self) -> str:
        return f"process {self.index} on {self.host}"


def start_processes(config: Config) -> int:
    """Join the other processes of the run, if there are any; before jax's devices start.

    With `processes.detect` they are those that SLURM, Open MPI, Kubernetes or Cloud TPU started. Nothing happens in a
    run of one process, and nobody joins twice.

    Returns:
      How many processes the run has.

    Raises:
      ProcessesError: some process is missing after `processes.timeout_s` (it is named), two have the same index, or
        settings differ between processes (they are named).
    """
    processes = find_processes(config.processes) if config.processes.detect else config.processes
    if processes.count is None:
        return 1
    if jax.distributed.is_initialized():
        return processes.count
    # CPU devices of several processes need this to talk; it changes nothing elsewhere.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM for itself; the trainer has its own way to stop.
    jax.config.update("jax_enable_preemption_service", False)
    assert processes.index is not None
    assert processes.coordinator is not None
    own = _Report(processes.index, socket.gethostname(), _settings(config))
    if processes.count > 1:
        (_call_the_roll if processes.index == 0 else _report)(own, processes)
    jax.distributed.initialize(
        processes.coordinator, processes.count, processes.index, initialization_timeout=processes.timeout_s
    )
    return processes.count


def _settings(config: Config) -> dict[str, Any]:
    """All settings that must be the same everywhere, by key path."""
    tree = config.model_dump(mode="json")
    del tree["processes"]["index"]
    return {f"{section}.{key}": value for section, values in tree.items() for key, value in values.items()}


def _call_the_roll(own: _Report, processes: ProcessesConfig) -> None:
    """Process 0: wait for the others, compare, and tell all of them what came of it."""
    host, port = _address(processes)
    deadline = time.monotonic() + processes.timeout_s
    present = {own.index: own}
    connections: list[socket.socket] = []
    try:
        server = socket.create_server((host, port))
    except OSError as error:
        raise ProcessesError(
            f"process 0 cannot listen on processes.coordinator = {processes.coordinator} ({error.strerror or error})"
            "; it must be an address of this machine and a free port"
        ) from error
    problem = ""
    with server:
        while len(present) < (processes.count or 1) and not problem and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                connection, _ = server.accept()
            except TimeoutError:
                break
            connection.settimeout(_PATIENCE_S)
            if (report := _received(connection)) is None:
                connection.close()  # not one of ours
                continue
            connections.append(connection)
            problem = _conflict(report, present, processes)
            present.setdefault(report.index, report)
    missing = [str(index) for index in range(processes.count or 1) if index not in present]
    if missing and not problem:
        here = ", ".join(str(present[index]) for index in sorted(present))
        problem = (
            f"{'process' if len(missing) == 1 else 'processes'} {', '.join(missing)} of {processes.count} did not "
            f"come up within {processes.timeout_s} s; present: {here}. Look at the logs of the missing ones, or "
            "raise processes.timeout_s"
        )
    for connection in connections:
        with connection:
            _send(connection, {"problem": problem})
    if problem:
        raise ProcessesError(problem)


def _report(own: _Report, processes: ProcessesConfig) -> None:
    """The other processes: report to process 0 and wait for its word."""
    with _connected(own, processes) as connection:
        # Process 0 answers when all are there, or when its own time is over.
        connection.settimeout(2 * processes.timeout_s)
        _send(connection, {"index": own.index, "host": own.host, "settings": own.settings})
        answer = _read(connection)
    if answer is None:
        raise ProcessesError(f"process 0 at {processes.coordinator} went away; its own log says why")
    if answer["problem"]:
        raise ProcessesError(answer["problem"])


def _connected(own: _Report, processes: ProcessesConfig) -> socket.socket:
    """A connection to process 0, which may come up later than this one."""
    deadline = time.monotonic() + processes.timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection(_address(processes), max(left, _PAUSE_S))
        except OSError as error:
            if left <= 0:
                raise ProcessesError(
                    f"{own} could not reach process 0 at processes.coordinator = {processes.coordinator} within "
                    f"{processes.timeout_s} s ({error.strerror or error}); is it running there?"
                ) from error
        time.sleep(_PAUSE_S)


def _conflict(report: _Report, present: dict[int, _Report], processes: ProcessesConfig) -> str:
    """Why a process cannot join; empty if it can."""
    own = present[0]
    if report.index in present:
        first = present[report.index].host
        return f"two processes have processes.index = {report.index}: on {first} and on {report.host}"
    if not 0 <= report.index < (processes.count or 1):
        return f"{report} cannot be one of {processes.count}: processes.index is 0 to {(processes.count or 1) - 1}"
    keys = own.settings.keys() | report.settings.keys()
    differing = sorted(key for key in keys if own.settings.get(key) != report.settings.get(key))
    if differing:
        there, here = report.settings, own.settings
        shown = "; ".join(f"{key}: {there.get(key)} there, {here.get(key)} in process 0" for key in differing)
        return f"{report} has other settings than process 0 ({shown}); start all processes with the same settings"
    return ""


def _address(processes: ProcessesConfig) -> tuple[str, int]:
    host, _, port = (processes.coordinator or "").rpartition(":")
    return host.strip("[]"), int(port)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # whoever has gone away needs no answer
        connection.sendall(json.dumps(message).encode() + b"\n")


def _read(connection: socket.socket) -> dict[str, Any] | None:
    """One line of JSON; None if there is none."""
    try:
        with connection.makefile("rb") as file:
            line = file.readline(_LONGEST)
        message = json.loads(line)
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None


def _received(connection: socket.socket) -> _Report | None:
    message = _read(connection)
    if message is None or message.keys() != {"index", "host", "settings"} or not isinstance(message["index"], int):
        return None
    return _Report(message["index"], str(message["host"]), dict(message["settings"]))
