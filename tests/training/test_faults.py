"""A request to stop is noted once, told once, and obeyed at once the second time."""

import os
import signal
import threading

import pytest

from ringjax.training.faults import StopSignals


def send(name: str) -> None:
    os.kill(os.getpid(), signal.Signals[name])


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_first_signal_is_noted_and_told_once(capfd, name, status):
    with StopSignals() as stop:
        assert (stop.requested, stop.exit_status) == (None, 0)
        send(name)
        send("SIGTERM")
        assert (stop.requested, stop.exit_status) == (name, status)
    told = capfd.readouterr()
    assert told.err.count("finishing this step, saving, then stopping") == 1
    assert told.err.strip().startswith(f"{name}: ")
    assert told.out == ""


@pytest.mark.parametrize("first", ["SIGTERM", "SIGINT"])
def test_a_later_ctrl_c_stops_at_once(first):
    with StopSignals() as stop:
        send(first)
        with pytest.raises(KeyboardInterrupt):
            send("SIGINT")
        assert stop.requested == first


def test_previous_handlers_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_does_nothing_outside_the_main_thread():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work():
        with StopSignals() as stop:
            seen.extend([signal.getsignal(signal.SIGTERM), stop.requested, stop.exit_status])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before, None, 0]
