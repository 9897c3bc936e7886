"""A run is the same run on every mesh, in one piece or several, and a broken one is never saved."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from hlo import shapes, weights_in_use

from ringjax.config import Config, ConfigError, load_config
from ringjax.training import DivergedError, StepResult, Trainer
from ringjax.training.faults import StopSignals
from ringjax.training.run_folder import RunFolderError

RING = ("mesh.seq=2",)
MIXED = ["mesh.fsdp=2", "mesh.seq=2", "mesh.tensor=2"]
EVERYTHING = [f"mesh.{axis}=2" for axis in ("stage", "data", "seq", "tensor")] + ["model.mlp_chunk=11"]
SAVING = (*RING, "train.save_every=10")
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture(scope="module")
def first_losses(small, tmp_path_factory):
    """Runs the first steps with some overrides; the losses."""

    def losses(*overrides: str, count: int = 20) -> list[float]:
        with Trainer(small(tmp_path_factory.mktemp("run"), *overrides)) as trainer:
            return [result.loss for result in islice(trainer.steps(), count)]

    return losses


@pytest.fixture(scope="module")
def alone(first_losses) -> list[float]:
    """Losses on one device."""
    losses = first_losses()
    assert losses[-1] < losses[0] - 1  # it learns: equal losses are not those of an idle optimizer
    return losses


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["mesh.seq=2"], marks=pytest.mark.slow),
        ["mesh.seq=4"],
        pytest.param(["mesh.seq=4", "attention.layout=contiguous"], marks=pytest.mark.slow),
        pytest.param(["mesh.seq=4", "attention.layout=striped"], marks=pytest.mark.slow),
        ["mesh.data=2", "optim.accumulate=2"],
        MIXED,
        ["mesh.stage=2", "mesh.seq=2", "train.microbatches=4"],
        pytest.param(EVERYTHING, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_mesh_and_layout_gives_the_losses_of_one_device(first_losses, alone, overrides):
    assert first_losses(*overrides) == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_layouts_are_one_and_the_same_on_one_device(first_losses, alone, layout):
    assert first_losses(f"attention.layout={layout}", count=3) == pytest.approx(alone[:3], rel=1e-4)


def quickstart(tmp_path: Path, *overrides: str) -> Config:
    """The settings a person starts with, in a folder of the test's own."""
    return load_config(QUICKSTART, [f"run.dir={tmp_path / 'run'}", "run.compilation_cache=null", *overrides])


@pytest.mark.slow
def test_quickstart_losses_are_equal_for_rings_and_layouts(tmp_path):
    found = {}
    for ring, layout in [(1, "zigzag"), (2, "zigzag"), (4, "zigzag"), (4, "contiguous"), (4, "striped")]:
        config = quickstart(tmp_path / f"{layout}{ring}", f"mesh.seq={ring}", f"attention.layout={layout}")
        assert (config.train.precision, config.data.seq_len >= 4096) == ("float32", True)
        with Trainer(config) as trainer:
            found[ring, layout] = [result.loss for result in islice(trainer.steps(), 20)]
    want = found[1, "zigzag"]
    assert want[-1] < want[0] - 1
    for losses in found.values():
        assert losses == pytest.approx(want, rel=1e-4)


def test_quickstart_step_moves_blocks_around_the_ring_and_gathers_only_weights(tmp_path):
    config = quickstart(tmp_path)
    assert config.mesh.seq >= 4
    with Trainer(config) as trainer:
        next(trainer.steps())
        compiled, weights = trainer.train_step, weights_in_use(trainer.state.params)
    assert compiled is not None
    assert shapes(compiled, "collective-permute")
    assert not shapes(compiled, "all-to-all")
    gathered = set(shapes(compiled, "all-gather"))
    assert gathered <= weights
    # Weights and activations cannot be mistaken for each other: no weight has a dim of tokens.
    tokens = {config.data.seq_len, config.data.seq_len // config.mesh.seq}
    assert not any(tokens & set(shape) for shape in weights)


def test_bfloat16_trains_on_float32_weights(small, tmp_path):
    with Trainer(small(tmp_path / "run", *RING, "train.precision=bfloat16")) as trainer:
        losses = [result.loss for result in islice(trainer.steps(), 20)]
        kinds = {leaf.dtype for leaf in jax.tree.leaves(trainer.state) if leaf.ndim > 0}
    assert losses[-1] < losses[0] - 1
    assert kinds == {np.dtype("float32")}


@dataclass(frozen=True)
class Whole:
    """A run that went through without a stop."""

    config: Config
    results: list[StepResult]
    params: Any
    records: list[dict]


def records(folder: Path) -> list[dict]:
    """metrics.jsonl, without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clock = ("tokens_per_s", "step_s", "data_wait_s")
    return [{key: value for key, value in line.items() if key not in clock} for line in lines]


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory) -> Whole:
    config = small(tmp_path_factory.mktemp("whole") / "run", *SAVING)
    with Trainer(config) as trainer:
        results = list(trainer.steps())
        params = jax.device_get(trainer.state.params)
    return Whole(config, results, params, records(trainer.folder.path))


def test_a_run_reports_every_step_and_evaluates_at_the_end(whole):
    assert [result.step for result in whole.results] == list(range(1, 21))
    assert all(result.report is not None for result in whole.results)
    assert [result.step for result in whole.results if result.eval_loss is not None] == [20]
    last = whole.results[-1]
    assert last.tokens == 20 * 4 * 128
    train = [record for record in whole.records if "loss" in record]
    assert [record["loss"] for record in train] == [result.loss for result in whole.results]
    assert train[-1].keys() >= {"step", "loss", "grad_norm", "lr", "tokens"}
    assert [record for record in whole.records if "eval_loss" in record] == [
        {"step": 20, "eval_loss": last.eval_loss}
    ]
    folder = Path(whole.config.run.dir)
    assert list((folder / "tensorboard").glob("events*"))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["00000010", "00000020"]
    assert load_config(folder / "config.yaml") == whole.config


def leave(trainer: Trainer) -> int:
    """Drop the iterator at a checkpoint."""
    return [result.step for result in islice(trainer.steps(), 10)][-1]


def stop(trainer: Trainer) -> int:
    """Ask for a stop between two checkpoints."""
    signals = StopSignals()
    for result in trainer.steps(signals):
        if result.step == 6:
            signals.requested = "SIGTERM"
    return trainer.done


@pytest.mark.parametrize("part", [leave, stop])
def test_a_run_in_two_parts_is_bitwise_the_run_in_one(whole, small, tmp_path, part):
    config = small(tmp_path / "run", *SAVING)
    with Trainer(config) as trainer:
        done = part(trainer)
    assert 0 < done < 20
    with Trainer(config) as trainer:
        assert trainer.start == done
        assert f"continuing from the checkpoint of step {done}" in trainer.notes[-1]
        results = list(trainer.steps())
        chex.assert_trees_all_equal(jax.device_get(trainer.state.params), whole.params)
    assert [result.step for result in results] == list(range(done + 1, 21))
    assert [result.loss for result in results] == [result.loss for result in whole.results[done:]]
    assert results[-1].eval_loss == whole.results[-1].eval_loss
    assert records(trainer.folder.path) == whole.records


@pytest.fixture
def half(whole, tmp_path) -> Path:
    """A copy of the whole run as it was at step 10."""
    folder = tmp_path / "half"
    shutil.copytree(whole.config.run.dir, folder)
    shutil.rmtree(folder / "checkpoints" / "00000020")
    return folder


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["mesh.seq=4", "attention.layout=striped"], marks=pytest.mark.slow),
        MIXED,
        pytest.param(["mesh.seq=1", "mesh.stage=2", "train.microbatches=4"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_goes_on_with_another_mesh_and_layout(whole, small, half, overrides):
    with Trainer(small(half, *SAVING, *overrides)) as trainer:
        assert trainer.start == 10
        losses = [result.loss for result in trainer.steps()]
    assert losses == pytest.approx([result.loss for result in whole.results[10:]], rel=1e-4)


def test_a_finished_run_trains_nothing_more(whole, small, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(whole.config.run.dir, folder)
    with Trainer(small(folder, *SAVING)) as trainer:
        assert trainer.start == 20
        assert list(trainer.steps()) == []
        assert trainer.evaluate() == whole.results[-1].eval_loss
    assert records(folder) == whole.records


def test_a_run_does_not_go_on_with_another_model(small, half):
    before = (half / "config.yaml").read_text()
    with pytest.raises(RunFolderError, match=r"model.mlp_dim: 48 -> 64"), Trainer(small(half, "model.mlp_dim=64")):
        pass
    assert (half / "config.yaml").read_text() == before


def test_a_stop_before_the_first_step_saves_nothing_and_compiles_nothing(small, tmp_path):
    signals = StopSignals()
    with Trainer(small(tmp_path / "run", *SAVING)) as trainer:
        signals.requested = "SIGINT"
        assert list(trainer.steps(signals)) == []
        assert (trainer.done, trainer.train_step) == (0, None)
    assert not trainer.folder.checkpoints.exists()


def test_the_state_is_donated(small, tmp_path):
    with Trainer(small(tmp_path / "run", *SAVING)) as trainer:
        first = jax.tree.leaves(trainer.state)
        next(trainer.steps())
        assert all(leaf.is_deleted() for leaf in first)


def test_a_cpus_step_is_over_before_the_next_one_begins(small, tmp_path):
    with Trainer(small(tmp_path / "run", *SAVING)) as trainer:
        for result in trainer.steps():
            assert result.step == trainer.done  # so that the time of each step is its own


def poisoned(steps: Iterator[StepResult], trainer: Trainer) -> Iterator[StepResult]:
    """After step 12 the weights are no longer numbers."""
    for result in steps:
        yield result
        if result.step == 12:
            params = jax.tree.map(lambda x: x * np.float32("nan"), trainer.state.params)
            trainer.state = type(trainer.state)(trainer.state.step, params, trainer.state.opt_state)


def test_a_diverged_run_ends_and_is_not_saved(small, tmp_path):
    config = small(tmp_path / "run", *SAVING)
    with Trainer(config) as trainer, pytest.raises(DivergedError) as caught:
        list(poisoned(trainer.steps(), trainer))
    message = str(caught.value)
    assert message.startswith(("step 13: loss is nan", "step 14: loss is nan"))  # it may be one step ahead
    for part in ("must be finite", "last checkpoint is that of step 10", "lower optim.lr", "another run.dir"):
        assert part in message
    with Trainer(config) as trainer:
        assert trainer.start == 10
        chex.assert_tree_all_finite(trainer.state.params)


def test_settings_built_in_python_are_checked(small, tmp_path):
    config = small(tmp_path / "run")
    config = config.model_copy(update={"data": config.data.model_copy(update={"seq_len": 130})})
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update={"seq": 4})})
    with pytest.raises(ConfigError, match=r"data.seq_len: 130 does not fit mesh.seq = 4"), Trainer(config):
        pass
    assert list(tmp_path.iterdir()) == []


def test_cpu_devices_never_share_a_program_from_the_compilation_cache(small, tmp_path):
    folder = tmp_path / "programs"
    usual = jax.config.values["jax_compilation_cache_dir"]
    try:
        for ring, used in ((2, None), (1, str(folder))):
            settings = (f"run.compilation_cache={folder}", f"mesh.seq={ring}")
            with Trainer(small(tmp_path / str(ring), *settings)) as trainer:
                assert jax.config.values["jax_compilation_cache_dir"] == used
                assert any("the compilation cache is off" in note for note in trainer.notes) == (used is None)
    finally:
        jax.config.update("jax_compilation_cache_dir", usual)
