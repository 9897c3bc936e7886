"""`ringjax compile` with real compilers, where one is installed: a pod's program, read without the pod."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; from ringjax.cli import main; sys.exit(main())"
# Training always packs documents, of which cuDNN knows nothing: a step that forgets them shows what else there is.
WITHOUT_DOCUMENTS = """
from ringjax.models import Decoder
hidden = Decoder.hidden
Decoder.hidden = lambda self, tokens, positions, documents, *rest: hidden(self, tokens, positions, None, *rest)
"""

TINY = [
    *("model.layers=2", "model.dim=256", "model.heads=4", "model.kv_heads=2", "model.head_dim=128"),
    *("model.mlp_dim=512", "data.seq_len=32768", "data.batch=1", "train.precision=bfloat16", "mesh.seq=8"),
]
HEADS = ("model.heads=32", "model.kv_heads=8", "model.head_dim=128")
TPU = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tpu")
GPU = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the extra cuda13-compiler"
)


def run(topology: str, *settings: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """In a process of its own: flags of these tests' CPU devices mean nothing to other compilers, and end them."""
    command = ["compile", "configs/quickstart.yaml", "--topology", topology, "--json", *TINY, *settings]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-c", before + PROGRAM, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )


def compiled(topology: str, *settings: str, before: str = "") -> dict:
    done = run(topology, *settings, before=before)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param("v5p:2x2x2", marks=TPU),
        pytest.param("v6e:2x4", marks=[TPU, pytest.mark.slow]),  # some three minutes: by hand, when a kernel changes
        pytest.param("h100:8", marks=GPU),
    ],
)
def test_every_hop_of_eight_devices_runs_under_a_kernel(topology):
    found = compiled(topology, *HEADS, "data.seq_len=65536")  # 8,192 tokens on each device
    assert found["devices"] == 8
    # In each of 2 layers 7 hops forward; 7 of blocks and 7 of their gradients backward.
    assert found["hops_covered"] == found["hops"] == 2 * 3 * 7
    assert 0 < found["memory"]["peak"] < found["memory"]["available"]
    assert {tuple(one["axes"]) for one in found["traffic"]} == {("seq",)}


@pytest.mark.parametrize(
    ("topology", "kernel"),
    [
        pytest.param("h100:4", "gpu", marks=GPU),
        # The same program, and a minute or more for each: by hand, when a kernel changes.
        *(
            pytest.param(topology, kernel, marks=[GPU, pytest.mark.slow])
            for topology in ("a100:4", "h100:4", "b200:4")
            for kernel in ("gpu", "cudnn")
            if (topology, kernel) != ("h100:4", "gpu")
        ),
        *(
            pytest.param(topology, kernel, marks=[TPU, pytest.mark.slow])
            for topology in ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
            for kernel in ("tpu", "splash")
        ),
    ],
)
def test_kernels_in_the_ring_in_a_stage_of_a_pipeline(topology, kernel):
    tensor = 2 if topology.startswith("tpu7x") else 1  # two devices on each chip
    stages = ("mesh.stage=2", "mesh.seq=2", f"mesh.tensor={tensor}", "data.batch=2")
    dim = 64 if kernel == "splash" else 128  # Splash wants a scale that is a power of two
    # By name, or another one might take its place.
    settings = (*stages, f"attention.kernel={kernel}", f"model.head_dim={dim}")
    found = compiled(topology, *settings, before=WITHOUT_DOCUMENTS if kernel == "cudnn" else "")
    assert found["mesh"]["stage"] == found["mesh"]["seq"] == 2
    # Each stage has one of the 2 layers, and both microbatches pass in 3 ticks: one hop forward, two backward.
    assert found["hops"] == 3 * 3
    assert ("collective-permute", ("stage",)) in {(one["kind"], tuple(one["axes"])) for one in found["traffic"]}


@TPU
def test_inputs_of_layers_wait_on_the_host():
    inputs = 2 * 32768 // 8 * 256 * 2  # layers, tokens of a device, dim, bytes
    # What is on its way is there twice.
    assert inputs <= compiled("v5p:2x2x2", "train.offload=true")["memory"]["host"] <= 2 * inputs


@TPU
def test_what_does_not_fit_says_by_how_much():
    done = run("v5e:2x2", "model.layers=40", "model.dim=8192", "model.mlp_dim=32768", "mesh.seq=4")
    assert done.returncode == 1
    assert "too much. What helps: train.offload=true" in done.stderr


@GPU
def test_a_kernel_that_cannot_do_what_a_run_needs_is_refused_at_once():
    done = run("h100:4", "mesh.seq=4", "attention.kernel=cudnn")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "attention.kernel: kernel 'cudnn' cannot do what is asked for here"
    )
    assert "Traceback" not in done.stderr
