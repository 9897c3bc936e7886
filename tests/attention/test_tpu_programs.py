"""The TPU kernel and the ring around it, compiled for TPUs that are not there: it takes libtpu, and no TPU.

Run by itself, this file compiles for the generations it is given and prints what it found:

    python tests/attention/test_tpu_programs.py v4 v5e v5p v6e tpu7x
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ringjax.attention import Mask, alibi_slopes, ring_attention
from ringjax.parallel import covered, read_hops
from ringjax.training.ahead import temporary_bytes

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x4", "v5p": "v5p:2x2x1", "v6e": "v6e:2x4", "tpu7x": "tpu7x:2x2x1"}
RING, BLOCK, HEADS, KV_HEADS, DIM = 4, 8192, 32, 8, 128
USUAL = [("v5p", "causal"), ("v6e", "causal"), ("v5e", "packed")]
CASES = {
    "causal": {},
    "packed": {"packed": True},
    "window": {"packed": True, "mask": Mask(window=3000)},
    "positions": {"packed": True, "positions": True},
    "scores": {"softcap": 5.0, "alibi_slopes": alibi_slopes(HEADS), "dropout_rate": 0.1, "dropout_seed": 1},
    "float32": {"dtype": "float32"},
    "splash": {"kernel": "splash", "scale": 0.125},  # which it takes only as a power of two
}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiling for TPUs takes libtpu: pip install 'ringjax[tpu]'",
)


def compiled(generation, packed=False, positions=False, dtype="bfloat16", **options):
    """Each lap's program, lowered and compiled, and the seconds that took."""
    topology = topologies.get_topology_desc(TOPOLOGIES[generation], "tpu")
    mesh = Mesh(np.array(topology.devices[:RING]), ("seq",))

    def array(*rest, dtype=dtype):
        sharding = NamedSharding(mesh, PartitionSpec(None, "seq"))
        return jax.ShapeDtypeStruct((1, RING * BLOCK, *rest), dtype, sharding=sharding)

    def forward(q, k, v, tokens):
        return ring_attention(q, k, v, mesh=mesh, layout="zigzag", return_lse=True, **tokens, **options)

    def pulled(q, k, v, tokens):
        return jax.vjp(lambda q, k, v: forward(q, k, v, tokens), q, k, v)[1]

    names = [name for name, given in (("segment_ids", packed), ("positions", positions)) if given]
    inputs = (
        array(HEADS, DIM),
        array(KV_HEADS, DIM),
        array(KV_HEADS, DIM),
        dict.fromkeys(names, array(dtype=jnp.int32)),
    )
    cotangents = array(HEADS, DIM), array(HEADS, dtype=jnp.float32)
    residuals = jax.tree.map(
        lambda x: array(*x.shape[2:], dtype=x.dtype) if x.shape[1:2] == (RING * BLOCK,) else x,
        jax.eval_shape(pulled, *inputs),
    )
    laps = {
        "forward": (forward, inputs),
        "backward": (lambda pullback, cotangents: pullback(cotangents), (residuals, cotangents)),
    }
    for name, (lap, arrays) in laps.items():
        start = time.monotonic()
        lowered = jax.jit(lap).lower(*arrays)
        yield name, lowered, lowered.compile(), time.monotonic() - start


def needed_bytes(lap, size):
    """What a device must hold, for inputs of `size` bytes a number, besides arguments and results.

    The queries, out in float32 and two blocks that travel; backward also dq and two travelling gradients.
    """
    q, kv = BLOCK * HEADS * DIM, 2 * BLOCK * KV_HEADS * DIM
    forward = q * (size + 4) + 2 * kv * size
    return forward if lap == "forward" else forward + q * 4 + 2 * kv * 4


def report(generation, case):
    """One line for each lap."""
    options = CASES[case]
    size = np.dtype(options.get("dtype", jnp.bfloat16)).itemsize
    for lap, lowered, program, seconds in compiled(generation, **options):
        plan = program.memory_analysis()
        assert plan is not None
        row = {
            "generation": generation,
            "case": case,
            "lap": lap,
            "seconds": round(seconds, 1),
            # Before compilation: jaxlib 0.10.2 cannot print what libtpu 0.0.52 compiled for tpu7x.
            "kernels": lowered.as_text().count("tpu_custom_call"),
            "temporary_bytes": temporary_bytes(plan, "tpu"),
            "needed_bytes": needed_bytes(lap, size),
        }
        if generation != "tpu7x":
            messages = [hop for hop in read_hops(program.as_text() or "") if not hop.is_of_tokens]
            row["covered"], row["hops"] = covered(messages)
        print(json.dumps(row), flush=True)


@pytest.mark.parametrize(
    ("generation", "case"),
    [
        *USUAL,
        *(
            pytest.param(generation, case, marks=pytest.mark.slow)
            for generation in TOPOLOGIES
            for case in CASES
            if (generation, case) not in USUAL
        ),
    ],
)
def test_laps_compile_within_their_memory(generation, case):
    # In a process of its own: one that has loaded libtpu is of no use for anything else.
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    for name in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS"):  # those of the suite are for CPUs
        environment.pop(name, None)
    command = [sys.executable, __file__, generation, "--case", case]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["lap"] for row in rows] == ["forward", "backward"]
    for row in rows:
        assert row["kernels"] >= 2, row
        if case != "splash":  # README: it takes more
            assert row["temporary_bytes"] <= 1.15 * row["needed_bytes"], row
    if case == "causal" and generation != "tpu7x":
        assert [(row["covered"], row["hops"]) for row in rows] == [(RING - 1,) * 2, (2 * (RING - 1),) * 2]


if __name__ == "__main__":
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    jax.config.update("jax_platforms", "cpu")
    arguments = sys.argv[1:]
    chosen = list(CASES)
    if "--case" in arguments:
        at = arguments.index("--case")
        chosen = [arguments.pop(at + 1)]
        arguments.pop(at)
    for generation in arguments:
        for case in chosen:
            report(generation, case)
