"""metrics.jsonl is the record of a run: valid JSON, no step twice, nothing lost; TensorBoard never stops it."""

import json
import logging
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from tensorboardX import RecordWriter
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

from ringjax.training.metrics import MetricsError, MetricsLog

FIGURES = {"grad_norm": 1.0, "lr": 1e-3, "tokens": 4096, "tokens_per_s": 10.0}


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(folder: Path) -> list[Event]:
    """All events, in the order in which TensorBoard reads them."""
    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


@pytest.fixture
def board(tmp_path) -> Path:
    return tmp_path / "run" / "tensorboard"


def test_each_call_is_one_object_at_once_on_disk_and_a_scalar_each(path, board):
    with MetricsLog(path, board) as log:
        log.train(10, loss=2.5, **FIGURES, data_wait_s=0.25)
        log.eval(10, eval_loss=np.float64(2.75))
        assert records(path) == [
            {"step": 10, "loss": 2.5, **FIGURES, "data_wait_s": 0.25},
            {"step": 10, "eval_loss": 2.75},
        ]
        scalars = {v.tag: (e.step, v.simple_value) for e in events(board) for v in e.summary.value}
    assert scalars["train/loss"] == (10, 2.5)
    assert scalars["train/data_wait_s"] == (10, 0.25)
    assert scalars["eval/loss"] == (10, 2.75)
    assert {"train/grad_norm", "train/lr", "train/tokens_per_s"} <= scalars.keys()


def test_numbers_that_are_not_finite_are_null(path, board):
    with MetricsLog(path, board) as log:
        log.train(1, loss=float("nan"), **FIGURES, worst=float("-inf"))
    (record,) = records(path)
    assert record["loss"] is None
    assert record["worst"] is None


def test_resuming_drops_later_records_and_a_torn_line(path, board):
    with MetricsLog(path, board) as log:
        for step in (10, 20, 30):
            log.train(step, loss=float(step), **FIGURES)
    with path.open("a") as file:
        file.write('{"step": 15, "lo')
    with MetricsLog(path, board, resume_step=20) as log:
        assert [r["step"] for r in records(path)] == [10, 20]
        log.train(30, loss=31.0, **FIGURES)
    assert [(r["step"], r["loss"]) for r in records(path)] == [(10, 10.0), (20, 20.0), (30, 31.0)]
    assert not list(path.parent.glob("*.partial"))
    starts = [e.step for e in events(board) if e.HasField("session_log")]
    assert starts == [1, 21]


def test_a_write_that_fails_is_one_clear_error(path, board):
    with MetricsLog(path, board) as log:
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, log._file.fileno())  # as on a full disk, opening went well and writing does not
        os.close(writing)
        with pytest.raises(MetricsError, match=r"metrics\.jsonl .*Broken pipe\. Make room"):
            log.train(1, loss=1.0, **FIGURES)


def test_an_unwritable_place_is_one_clear_error(tmp_path, board):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(MetricsError, match=r"metrics\.jsonl must be a file"):
        MetricsLog(tmp_path / "metrics.jsonl", board)


def test_a_failing_tensorboard_is_one_warning_and_no_more(path, board, caplog, monkeypatch):
    def fail(*_):
        raise OSError(28, os.strerror(28))

    with caplog.at_level(logging.WARNING), MetricsLog(path, board) as log:
        monkeypatch.setattr(RecordWriter, "flush", fail)
        for step in (1, 2, 3):
            log.train(step, loss=1.0, **FIGURES)
    assert [r["step"] for r in records(path)] == [1, 2, 3]
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


def test_a_tensorboard_folder_that_cannot_be_made_is_one_warning(path, board, caplog):
    path.parent.mkdir()
    board.write_text("in the way")
    with caplog.at_level(logging.WARNING), MetricsLog(path, board) as log:
        log.train(1, loss=1.0, **FIGURES)
    assert len(caplog.records) == 1
    assert len(records(path)) == 1
