"""Processes that jax finds by itself, in an environment as SLURM and Open MPI make it, on the loopback interface."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; from ringjax.cli import main; sys.exit(main())"
# jax derives the port of process 0 from a job's number: tests that run at the same time need different ones.
JOB = os.getpid() * 8

Environment = Callable[[int, int, int], dict[str, str]]


def slurm(job: int, index: int, count: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
    }


def open_mpi(job: int, index: int, count: int) -> dict[str, str]:
    return {
        "OMPI_MCA_orte_hnp_uri": f"{job * 4096}.0;tcp://127.0.0.1:1",
        "OMPI_COMM_WORLD_SIZE": str(count),
        "OMPI_COMM_WORLD_RANK": str(index),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(index),
    }


@pytest.fixture
def start(small_settings, quick_environment, tmp_path):
    """Starts one process of a run in tmp_path / "run"; those that are left are ended."""
    started = []

    def start(environment: dict[str, str], *overrides: str) -> subprocess.Popen[str]:
        small = ["run.platform=cpu", f"run.dir={tmp_path / 'run'}", "processes.detect=true", "train.steps=3"]
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "train", "configs/quickstart.yaml", *small_settings, *small, *overrides],
            cwd=ROOT,
            env={name: value for name, value in quick_environment.items() if name != "JAX_PLATFORMS"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def finished(processes: list[subprocess.Popen[str]], status: int = 0) -> list[tuple[str, str]]:
    """What they print, once all have ended with this status."""
    outputs = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [status] * len(processes), outputs
    return outputs


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line.get("loss", line.get("eval_loss")) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(("environment", "job"), [(slurm, 1), (open_mpi, 2)], ids=["SLURM", "Open MPI"])
def test_the_losses_are_those_of_one_process(start, tmp_path, environment: Environment, job: int):
    found = [start(environment(JOB + job, index, 2), "mesh.seq=4") for index in range(2)]
    (out, _), (silent, _) = finished(found)
    assert "CPU: 4 virtual devices in 2 processes" in out
    assert "step 3/3" in out
    assert "step" not in silent  # gloo has its say there
    alone = tmp_path / "alone"
    finished([start({}, "mesh.seq=4", "processes.detect=false", f"run.dir={alone}")])
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-6)


def test_other_settings_are_named_in_all_processes(start, tmp_path):
    settings = [["mesh.seq=4"], ["mesh.seq=1", "optim.lr=0.5"]]
    found = [start(slurm(JOB + 3, index, 2), *overrides) for index, overrides in enumerate(settings)]
    for _, err in finished(found, 1):
        assert "process 1 on " in err
        assert "has other settings than process 0 (mesh.seq: 1 there, 4 in process 0; optim.lr: 0.5 there" in err
    assert not (tmp_path / "run").exists()


def test_the_missing_are_named(start, tmp_path):
    found = [start(slurm(JOB + 4, index, 3), "processes.timeout_s=9") for index in (0, 2)]
    for _, err in finished(found, 1):
        assert "process 1 of 3 did not come up within 9 s" in err
    assert not (tmp_path / "run").exists()


def test_nothing_to_detect(start):
    ((_, err),) = finished([start({})], 1)
    assert "processes.detect = true, and jax finds no processes of SLURM" in err
