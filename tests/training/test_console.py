"""Plain lines in files and pipes; one live bar on a terminal; numbers for people."""

import io
import os
import pty
import re
import sys
from contextlib import suppress

import pytest

from ringjax.training.console import Console, StepReport, format_bytes, format_count, format_seconds, plural

REPORT = StepReport(
    loss=3.1234,
    lr=1e-3,
    grad_norm=0.912,
    tokens_per_s=12345,
    tokens_per_s_device=3086,
    step_s=0.33,
    data_wait_s=0.001,
    memory=512_000_000,
    eta_s=62,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (999.9, "1k"), (12345, "12.3k"), (1234567, "1.23M"), (7e9, "7B"), (2.5e15, "2,500T")],
)
def test_counts(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12 B"), (512e6, "512 MB"), (1.5e9, "1.5 GB"), (999_999, "1 MB"), (0, "0 B")]
)
def test_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.001, "1 ms"),
        (0.33, "0.33 s"),
        (12.46, "12.5 s"),
        (59.96, "1m00s"),
        (62, "1m02s"),
        (3599.7, "1h00m"),
        (11100, "3h05m"),
        (187200, "2d04h"),
        (float("inf"), "?"),
    ],
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_elsewhere_each_report_is_one_plain_line():
    file = io.StringIO()
    console = Console(file)
    console.table([("model", "4 layers [bold]not markup[/bold]"), ("parameters", "3.1M " + "long " * 40)])
    with console.progress(total=200, start=0) as progress:
        progress.advance(10)
        progress.report(20, REPORT)
        console.evaluation(50, 2.81, unit="nats/byte")
    lines = file.getvalue().splitlines()
    assert lines[0] == "model       4 layers [bold]not markup[/bold]"
    assert lines[1].startswith("parameters  3.1M long")
    assert len(lines[1]) > 200
    assert lines[2:] == [
        "step 20/200  loss 3.123  lr 1.0e-03  grad 0.91  12.3k tok/s (3.09k/device)  0.33 s/step  data 1 ms"
        "  mem 512 MB  eta 1m02s",
        "eval step 50  loss 2.810 nats/byte",
    ]


def test_figures_that_are_unknown_are_left_out():
    bare = StepReport(
        loss=1, lr=1, grad_norm=1, tokens_per_s=1, tokens_per_s_device=1, step_s=1, data_wait_s=0, mfu=0.412
    )
    assert str(bare).endswith("data 0 ms  mfu 41.2%")


def test_default_is_the_standard_output_of_the_moment(capsys):
    Console().line("hello")
    assert capsys.readouterr().out == "hello\n"


def on_terminal(monkeypatch, term: str) -> str:
    """What a terminal is sent during a short training."""
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "200")
    reading, writing = pty.openpty()
    with os.fdopen(writing, "w") as file:
        console = Console(file)
        console.table([("model", "4 layers")])
        with console.progress(total=200, start=0) as progress:
            progress.report(20, REPORT)
            console.evaluation(50, 2.81, unit="nats/byte")
            assert sys.stderr is sys.__stderr__ or not sys.stderr.isatty()
        file.flush()
    text = b""
    with suppress(OSError):  # how Linux says that the terminal was closed
        while chunk := os.read(reading, 1 << 16):
            text += chunk
    os.close(reading)
    return text.decode()


def test_a_terminal_gets_a_bar_and_evaluations_above_it(monkeypatch):
    text = on_terminal(monkeypatch, "xterm-256color")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "\x1b[" in text
    assert "━" in plain
    assert "step 20/200" in plain
    assert "eta 1m02s  loss 3.123" in plain
    evaluation = plain.index("eval step 50  loss 2.810 nats/byte")
    assert plain.rindex("step 20/200") > evaluation


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    text = on_terminal(monkeypatch, "dumb")
    assert "\x1b" not in text
    assert "step 20/200  loss 3.123" in text


def test_a_reader_that_went_away_does_not_stop_the_run():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        console = Console(file)
        for _ in range(3):
            console.line("nobody reads this")


def test_without_a_standard_output(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    Console().table([("model", "4 layers")])


def test_plurals():
    assert [plural(count, "layer") for count in (0, 1, 2)] == ["0 layers", "1 layer", "2 layers"]
