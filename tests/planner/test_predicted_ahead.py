"""Predictions against programs for accelerators that are not here, where a compiler for them is installed.

`pytest -m slow` compares more meshes; all of it takes the extra tpu or cuda13-compiler.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringjax.config import load_config
from ringjax.planner import model_flops
from ringjax.planner.memory import memory
from ringjax.planner.sizes import Sizes
from ringjax.planner.traffic import traffic

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; from ringjax.cli import main; sys.exit(main())"
VOCAB = 32000
SMALL = [
    *("model.layers=4", "model.dim=1024", "model.heads=8", "model.kv_heads=4", "model.head_dim=128"),
    *("model.mlp_dim=2816", f"model.vocab_size={VOCAB}", "train.precision=bfloat16"),
]
LARGE = [*SMALL, "model.layers=8", "model.dim=2048", "model.heads=16", "model.mlp_dim=8192"]
CASES = {
    "ring": [*SMALL, "mesh.seq=8", "data.seq_len=65536"],
    "rows": [*SMALL, "mesh.seq=1", "mesh.fsdp=8", "data.seq_len=8192", "data.batch=8"],
    "mixed": [*SMALL, "mesh.seq=2", "mesh.fsdp=2", "mesh.tensor=2", "data.seq_len=16384", "data.batch=2"],
    "all saved": [*SMALL, "mesh.seq=8", "data.seq_len=65536", "train.remat=none"],
    "a larger model": [*LARGE, "mesh.seq=8", "data.seq_len=65536"],
    "float32": [*SMALL, "mesh.seq=8", "data.seq_len=65536", "train.precision=float32"],
}
TPU = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tpu")
GPU = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the extra cuda13-compiler"
)
SLOW = pytest.mark.slow


def compiled(topology: str, settings: list[str]) -> dict:
    """In a process of its own: flags of these tests' CPU devices mean nothing to other compilers, and end them."""
    command = ["compile", "configs/quickstart.yaml", "--topology", topology, "--json", *settings]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("topology", "platform", "name"),
    [
        pytest.param("v5p:2x2x2", "tpu", "ring", marks=TPU),
        pytest.param("h100:8", "gpu", "ring", marks=GPU),
        pytest.param("h100:8", "gpu", "mixed", marks=(GPU, SLOW)),
        *(
            pytest.param("v5p:2x2x2", "tpu", name, marks=(TPU, SLOW))
            for name in ("mixed", "all saved", "a larger model")
        ),
        *(
            pytest.param("h100:8", "gpu", name, marks=(GPU, SLOW))
            for name in ("rows", "all saved", "a larger model", "float32")
        ),
    ],
)
def test_a_program_is_what_was_predicted(topology, platform, name):
    config = load_config(ROOT / "configs" / "quickstart.yaml", CASES[name])
    found = compiled(topology, CASES[name])
    assert Sizes.of(config, VOCAB).parameters == found["parameters"]
    assert model_flops(config, VOCAB) == pytest.approx(found["flops"] * found["devices"])
    # The program's own text is memory too, some 50 MB on a TPU whatever the model; it is no part of the prediction.
    plan, predicted = found["memory"], memory(config, VOCAB, platform)
    assert 0.95 <= predicted.total / (plan["arguments"] + plan["temporaries"]) <= 1.15
    check_sent(found, traffic(config, VOCAB, platform))


def check_sent(found: dict, want: dict) -> None:
    """Every kind and axis, and no other."""
    sent = {(one["kind"], tuple(one["axes"])): one["bytes"] for one in found["traffic"] if one["bytes"] > 10_000}
    assert sent.keys() == want.keys()
    for key, size in want.items():
        # Hops of tokens besides: 4 bytes each, to the kilobyte or so of its keys and values.
        assert size == pytest.approx(sent[key], rel=0.002), key


@GPU
@pytest.mark.parametrize(
    "axes",
    [
        ("data", "stage", "seq"),
        pytest.param(("data", "fsdp", "seq"), marks=SLOW),
        pytest.param(("stage", "fsdp", "seq"), marks=SLOW),
        pytest.param(("data", "seq", "tensor"), marks=SLOW),
        pytest.param(("stage", "seq", "tensor"), marks=SLOW),
    ],
    ids="-".join,
)
def test_stages_and_data_send_what_was_predicted(axes):
    settings = [*SMALL, *(f"mesh.{axis}=2" for axis in axes), "data.seq_len=16384", "data.batch=8"]
    want = traffic(load_config(ROOT / "configs" / "quickstart.yaml", settings), VOCAB, "gpu")
    check_sent(compiled("h100:8", settings), want)
