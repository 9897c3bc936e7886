"""The launch templates are valid in their languages, and what they ask of ringjax is legal."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from ringjax.config import load_config

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "configs" / "launch"
SCRIPTS = sorted(FOLDER.glob("*.sh"))


def test_there_is_one_for_each_kind_of_cluster():
    assert {path.name for path in FOLDER.iterdir()} == {"slurm.sh", "tpu_vm.sh", "gke_jobset.yaml"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_and_their_example_is_legal(path):
    subprocess.run(["bash", "-n", path], check=True)
    assert os.access(path, os.X_OK)
    text = path.read_text()
    config, *overrides = re.findall(r"configs/(\w+\.yaml.*?) \[key", text)[0].split()
    fixed = re.findall(r"(?:run|processes)\.\w+=\w+", text)
    loaded = load_config(ROOT / "configs" / config, [*overrides, *fixed])
    assert loaded.processes.detect
    assert loaded.run.platform in ("gpu", "tpu")


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Commands that print their arguments, first on the path."""

    def make(name, status=0):
        path = tmp_path / name
        path.write_text(f'#!/usr/bin/env bash\nprintf "%s|" {name} "$@"\necho\nexit {status}\n')
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return make


def ran(*command, status=0):
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == status, done.stderr
    return done.stdout.splitlines()


def test_slurm_passes_the_settings_on_and_queues_a_stopped_run_again(fakes, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    fakes("srun", status=75)
    fakes("scontrol")
    run, again = ran(FOLDER / "slurm.sh", "configs/quickstart.yaml", "model.window=[8, null]", status=75)
    assert "ringjax|train|configs/quickstart.yaml|model.window=[8, null]|run.platform=gpu|" in run
    assert again == "scontrol|requeue|17|"
    fakes("srun", status=1)
    assert len(ran(FOLDER / "slurm.sh", "configs/quickstart.yaml", status=1)) == 1


def test_a_tpu_slice_gets_the_settings_whole(fakes):
    fakes("gcloud")
    (line,) = ran(
        FOLDER / "tpu_vm.sh", "pod", "zone", "configs/quickstart.yaml", "data.pattern=**/*.md", "run.dir=a b"
    )
    command = shlex.split(line.split("--command=")[1].rstrip("|").split("&& ")[1])
    assert command[1:5] == ["train", "configs/quickstart.yaml", "data.pattern=**/*.md", "run.dir=a b"]
    assert ran(FOLDER / "tpu_vm.sh", "pod", status=2) == []


def test_the_jobset_is_yaml_with_legal_settings():
    (job,) = yaml.safe_load((FOLDER / "gke_jobset.yaml").read_text())["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    program, command, config = container["command"]
    assert (program, command) == ("ringjax", "train")
    loaded = load_config(ROOT / config, container["args"])
    assert loaded.mesh.seq == pods["parallelism"] * container["resources"]["limits"]["google.com/tpu"]
    assert loaded.processes.detect
