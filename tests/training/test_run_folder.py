"""A run folder is ready, or the message says what is in the way; one process, one configuration."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringjax.config import Config, load_config
from ringjax.training.run_folder import RunFolder, RunFolderError


def changed(config: Config, section: str, **values) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


@pytest.fixture
def base() -> Config:
    return Config()


@pytest.fixture
def used(tmp_path, base) -> Path:
    """A folder whose run has saved something."""
    with RunFolder(tmp_path / "run") as folder:
        folder.adopt(base)
        (folder.checkpoints / "00000010").mkdir(parents=True)
    return tmp_path / "run"


def test_makes_the_folder_and_writes_settings_that_load_back(tmp_path, base):
    with RunFolder(tmp_path / "a" / "b") as folder:
        folder.adopt(base)
        assert load_config(folder.config) == base
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == [".lock", "config.yaml"]


@pytest.mark.parametrize("path", ["file", "file/run"])
def test_a_file_in_the_way_is_named(tmp_path, path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunFolderError, match=r"must be a folder; .*file is a file"):
        RunFolder(tmp_path / path)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_place_where_nothing_can_be_made_is_refused():
    with pytest.raises(RunFolderError, match=r"/proc/run: .*another run.dir"):
        RunFolder("/proc/run")


def test_a_full_disk_is_found_at_once_and_nothing_is_left(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("ringjax.training.run_folder.os.fsync", full)
    with pytest.raises(RunFolderError, match="No space left on device"):
        RunFolder(tmp_path / "a" / "run")
    assert list(tmp_path.iterdir()) == []


def test_settings_are_written_whole_or_not_at_all(used, base, monkeypatch):
    before = (used / "config.yaml").read_text()
    with RunFolder(used) as folder:

        def full(_):
            raise OSError(28, os.strerror(28))

        monkeypatch.setattr("ringjax.training.run_folder.os.fsync", full)
        with pytest.raises(RunFolderError, match="No space left"):
            folder.adopt(changed(base, "train", steps=7))
    assert (used / "config.yaml").read_text() == before
    assert not list(used.glob("*.partial"))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("mesh", "seq", 4),
        ("attention", "layout", "striped"),
        ("train", "steps", 999),
        ("run", "platform", "cpu"),
        ("model", "mlp_chunk", 7),
        ("model", "loss_chunk", 9),
        ("optim", "accumulate", 2),
        ("data", "eval_batches", 1),
        ("run", "compilation_cache", "cache"),
    ],
)
def test_a_run_may_go_on_with_another_mesh_layout_or_length(used, base, section, key, value):
    config = changed(base, section, **{key: value})
    with RunFolder(used) as folder:
        folder.adopt(config)
        assert load_config(folder.config) == config


def test_a_run_may_not_go_on_with_settings_that_change_its_numbers(used, base):
    config = changed(base, "model", dim=512)
    config = changed(config, "data", tokenizer="bytes", batch=8)
    config = changed(config, "optim", clip_norm=None)
    config = changed(config, "run", seed=5)
    config = changed(config, "train", precision="bfloat16", steps=999)
    with RunFolder(used) as folder:
        with pytest.raises(RunFolderError) as caught:
            folder.adopt(config)
        assert load_config(folder.config) == base
    lines = str(caught.value).splitlines()
    assert lines[1:-1] == [
        f"  model.dim: {base.model.dim} -> 512",
        f"  data.batch: {base.data.batch} -> 8",
        f"  optim.clip_norm: {base.optim.clip_norm} -> null",
        "  run.seed: 0 -> 5",
        "  train.precision: float32 -> bfloat16",
    ]
    assert "another run.dir" in lines[-1]


def test_a_run_that_saved_nothing_does_not_bind_the_next(tmp_path, base):
    with RunFolder(tmp_path / "run") as folder:
        folder.adopt(base)
        folder.adopt(changed(base, "model", dim=512))
        assert load_config(folder.config).model.dim == 512


def test_earlier_settings_that_cannot_be_read_are_refused(used, base):
    (used / "config.yaml").write_text("model: {dimm: 4}\n")
    with RunFolder(used) as folder, pytest.raises(RunFolderError, match=r"cannot be read:\n.*dimm"):
        folder.adopt(base)


def test_two_processes_cannot_hold_one_folder(tmp_path):
    code = "import sys; from ringjax.training.run_folder import RunFolder; RunFolder(sys.argv[1])"
    other = [sys.executable, "-c", code, str(tmp_path / "run")]
    with RunFolder(tmp_path / "run"):
        ran = subprocess.run(other, capture_output=True, text=True)
        assert f"in use by another process (id {os.getpid()})" in ran.stderr
    assert subprocess.run(other).returncode == 0
    RunFolder(tmp_path / "run").close()


def test_checkpoints_without_their_settings_are_refused(used, base):
    (used / "config.yaml").unlink()
    with RunFolder(used) as folder, pytest.raises(RunFolderError, match=r"config\.yaml .* is gone"):
        folder.adopt(base)


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
def test_a_file_in_place_of_a_folder_inside_is_found_before_training(tmp_path, base, name):
    with RunFolder(tmp_path / "run") as folder:
        (folder.path / name).write_text("in the way")
        with pytest.raises(RunFolderError, match=f"{name} must be a folder"):
            folder.adopt(base)
