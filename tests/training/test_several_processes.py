"""Runs of several processes: the numbers of one process, checkpoints for any, stops and failures together."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; from ringjax.cli import main; sys.exit(main())"
MESH = ("mesh.data=2", "mesh.seq=4", "train.save_every=4", "train.steps=8", "train.sample_tokens=8")


@pytest.fixture(scope="module")
def launch(small_settings, quick_environment):
    """Starts `ringjax launch local` or, for one process, `ringjax train`, on a folder."""

    def start(count: int, folder: Path, *overrides: str) -> subprocess.Popen[str]:
        command = ["train"] if count == 1 else ["launch", "local", "--procs", str(count)]
        settings = [*small_settings, *MESH, f"run.dir={folder}", *overrides]
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *command, "configs/quickstart.yaml", *settings],
            cwd=ROOT,
            env=quick_environment | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def finished(process: subprocess.Popen[str], status: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=400)
    assert process.returncode == status, err
    return out, err


def losses(folder: Path) -> list[float]:
    """Of training and evaluation, in order."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line.get("loss", line.get("eval_loss")) for line in lines]


@pytest.fixture(scope="module")
def alone(launch, tmp_path_factory) -> Path:
    """The folder of a run of one process with 8 devices."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    finished(launch(1, folder))
    return folder


@pytest.mark.slow
def test_the_losses_are_those_of_one_process(launch, alone, tmp_path):
    out, _ = finished(launch(2, tmp_path / "run"))
    assert out.count("step 8/8") == 1  # one process speaks
    assert "CPU: 8 virtual devices in 2 processes" in out
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-6)


@pytest.mark.slow
def test_a_stop_is_agreed_on_and_another_number_of_processes_goes_on(launch, alone, tmp_path):
    folder = tmp_path / "run"
    process = launch(2, folder, "train.steps=8")
    metrics = folder / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = finished(process, 75)
    assert "stopped by SIGTERM after step" in out
    done = int(max((folder / "checkpoints").iterdir()).name)
    assert 2 <= done < 8
    out, _ = finished(launch(4, folder))
    assert "CPU: 8 virtual devices in 4 processes" in out
    assert f"continuing from the checkpoint of step {done}" in out
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-6)


@pytest.mark.slow
def test_a_process_that_fails_ends_the_run_with_its_message(launch, tmp_path):
    (tmp_path / "run").write_text("in the way")
    _, err = finished(launch(2, tmp_path / "run"), 1)
    assert "run.dir must be a folder" in err
