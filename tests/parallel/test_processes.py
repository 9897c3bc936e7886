"""The roll call: who is missing, double or different is named, in every process."""

import socket
import threading
import time
from contextlib import suppress

import pytest

from ringjax.config import Config, ProcessesConfig, TrainConfig
from ringjax.parallel import ProcessesError
from ringjax.parallel import processes as module


@pytest.fixture
def port():
    """A free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def joined(monkeypatch):
    """The processes that went on to jax.distributed."""
    found = []
    monkeypatch.setattr("jax.distributed.initialize", lambda address, count, index, **_: found.append(index))
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: False)
    return found


@pytest.fixture
def outcomes(port, joined):
    """Starts processes, as threads, and returns what went wrong in each: index -> message."""

    def run(*indices, count=3, timeout_s=20, steps=None):
        errors = []

        def start(index, steps):
            processes = ProcessesConfig(
                count=count, index=index, coordinator=f"127.0.0.1:{port}", timeout_s=timeout_s
            )
            try:
                module.start_processes(Config(processes=processes, train=TrainConfig(steps=steps)))
            except ProcessesError as error:
                errors.append((index, str(error)))

        threads = [
            threading.Thread(target=start, args=(index, (steps or {}).get(index, 7)), daemon=True)
            for index in indices
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return sorted(errors)

    return run


def test_all_there(outcomes, joined):
    assert outcomes(2, 0, 1) == []
    assert sorted(joined) == [0, 1, 2]


def test_one_process_needs_no_roll_call(outcomes, joined):
    assert outcomes(0, count=1) == []
    assert joined == [0]


def test_the_missing_are_named_everywhere(outcomes, joined):
    found = outcomes(0, 2, count=4, timeout_s=1)
    assert [index for index, _ in found] == [0, 2]
    for _, message in found:
        assert message.startswith("processes 1, 3 of 4 did not come up within 1 s; present: process 0 on ")
        assert ", process 2 on " in message
    assert joined == []


def test_without_the_first_process_the_others_say_so(outcomes):
    ((index, message),) = outcomes(1, timeout_s=1)
    assert index == 1
    assert message.startswith("process 1 on ")
    assert "could not reach process 0 at processes.coordinator = 127.0.0.1:" in message


def test_other_settings_are_named(outcomes, joined):
    for index, message in outcomes(0, 1, count=2, steps={1: 8}):
        assert "process 1 on " in message, index
        assert "has other settings than process 0 (train.steps: 8 there, 7 in process 0)" in message
    assert joined == []


def test_the_same_index_twice(outcomes, joined):
    found = outcomes(0, 1, 1)
    assert [index for index, _ in found] == [0, 1, 1]
    assert all("two processes have processes.index = 1" in message for _, message in found)
    assert joined == []


def _connected(port):
    """A connection to process 0, once it listens."""
    for _ in range(200):
        with suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port), 1)
        time.sleep(0.05)
    pytest.fail("process 0 does not listen")


def test_strangers_are_ignored(outcomes, port, joined, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE_S", 0.5)
    first = []
    waiting = threading.Thread(target=lambda: first.extend(outcomes(0, count=2)), daemon=True)
    waiting.start()
    for line in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"index": "x"}\n', b"", b"no end"):
        with _connected(port) as stranger:
            stranger.sendall(line)
            if line == b"no end":
                time.sleep(1)  # and it does not hang up
    assert outcomes(1, count=2) == []
    waiting.join(60)
    assert first == []
    assert sorted(joined) == [0, 1]


def test_an_address_that_is_not_this_machines(outcomes, monkeypatch):
    monkeypatch.setattr(module, "_address", lambda _: ("192.0.2.1", 1))  # of the block for documentation
    ((_, message),) = outcomes(0)
    assert "process 0 cannot listen on processes.coordinator" in message


def test_a_joined_process_joins_once(monkeypatch):
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("jax.distributed.initialize", lambda *_, **__: pytest.fail("joined twice"))
    processes = ProcessesConfig(count=2, index=1, coordinator="127.0.0.1:1")
    assert module.start_processes(Config(processes=processes)) == 2


def test_finders_that_jax_no_longer_has_are_an_error(monkeypatch):
    monkeypatch.delattr("jax._src.clusters.ClusterEnv.auto_detect_unset_distributed_params")
    with pytest.raises(
        ProcessesError, match=r"does not work with jax \d.*set processes.count, index and coordinator"
    ):
        module.start_processes(Config(processes=ProcessesConfig(detect=True)))
