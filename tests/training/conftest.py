"""A small corpus and a run over it that takes seconds, from a program or from the command line."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ringjax.config import Config, load_config

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
# Tests share these, so that each mesh's program is compiled once; it depends on train.steps by way of the schedule.
SMALL = (
    "run.platform=auto",
    "run.compilation_cache=null",
    "mesh.seq=1",
    "attention.layout=zigzag",
    "model.layers=2",
    "model.dim=32",
    "model.heads=4",
    "model.kv_heads=2",
    "model.head_dim=8",
    "model.mlp_dim=48",
    "model.loss_chunk=24",
    "data.source=text",
    "data.seq_len=128",
    "data.batch=4",
    "data.eval_batches=2",
    "data.eval_fraction=0.2",
    "optim.lr=0.01",
    "optim.warmup_steps=4",
    "optim.accumulate=1",
    "train.steps=20",
    "train.log_every=1",
    "train.eval_every=0",
    "train.save_every=0",
    "train.precision=float32",
    "train.sample_tokens=0",
)

Small = Callable[..., Config]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Documents from a few bytes to a few sequences long: rows hold several, and weights differ from row to row."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    words = ["ring", "block", "hop", "lap", "the", "query", "meets", "every", "key", "once"]
    for index in range(60):
        text = " ".join(rng.choice(words, int(rng.integers(1, 80))))
        (folder / f"{index}.txt").write_text(text)
    return folder


@pytest.fixture(scope="session")
def small_settings(corpus) -> list[str]:
    """The settings of a small run, for a command line."""
    return [*SMALL, f"data.path={corpus}"]


@pytest.fixture(scope="session")
def small(corpus) -> Small:
    """Settings of a small run, from its folder and overrides."""

    def make(run_dir: Path, *overrides: str) -> Config:
        return load_config(QUICKSTART, [*SMALL, f"data.path={corpus}", f"run.dir={run_dir}", *overrides])

    return make
