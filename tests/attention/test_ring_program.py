"""What the compiled program sends and holds, read from its text."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hlo import executed

from ringjax.attention import Mask, ring_attention
from ringjax.attention.kernels import XlaKernel

BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 4, 2, 8, 16


def compiled(mesh, length, what, layout="zigzag", packed=False, mask=Mask()):  # noqa: B008 (frozen)
    """Forward lap, or backward lap with the forward's residuals as input, at L tokens a device."""
    seq = length * mesh.shape["seq"]
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "seq"))

    def zeros(heads, dim):
        return jax.device_put(jnp.zeros((BATCH, seq, heads, dim)), sharding)

    def forward(q, k, v):
        kernel = XlaKernel(q_tile=16, k_tile=8)
        return ring_attention(q, k, v, mesh=mesh, layout=layout, mask=mask, segment_ids=segments, kernel=kernel)

    inputs = zeros(HEADS, DIM), zeros(KV_HEADS, DIM), zeros(KV_HEADS, VALUE_DIM)
    segments = jax.device_put(jnp.zeros((BATCH, seq), jnp.int32), sharding) if packed else None
    if what == "forward":
        return jax.jit(forward).lower(*inputs).compile()
    _, pullback = jax.vjp(forward, *inputs)
    return jax.jit(lambda pullback, dout: pullback(dout)).lower(pullback, zeros(HEADS, VALUE_DIM)).compile()


@pytest.mark.parametrize(
    ("ring", "layout"),
    [(1, "zigzag"), (2, "zigzag"), (3, "striped"), (4, "zigzag"), (5, "contiguous"), (8, "zigzag")],
)
def test_each_block_makes_one_hop_less_than_there_are_devices(mesh_of, ring, layout):
    message = ("collective-permute", "f32", (BATCH, KV_HEADS, 16, DIM + VALUE_DIM))  # K and V side by side
    expected = Counter({message: ring - 1} if ring > 1 else {})
    assert executed(compiled(mesh_of(ring), 16, "forward", layout)) == expected
    # Keys and values, and their gradients: R - 1 hops each.
    assert executed(compiled(mesh_of(ring), 16, "backward", layout)) == expected + expected


def test_segments_travel_only_when_there_are_any(mesh_of):
    sent = executed(compiled(mesh_of(4), 16, "forward", packed=True))
    assert sent[("collective-permute", "s32", (BATCH, 16))] == 3
    assert len(sent) == 2


CHUNK = 16  # tokens of a chunk, in both layouts


@pytest.mark.parametrize(
    ("layout", "mask", "hops"),
    [
        pytest.param("contiguous", Mask(window=1), 0, marks=pytest.mark.slow),
        ("contiguous", Mask(window=2), 1),
        pytest.param("contiguous", Mask(window=CHUNK + 1), 1, marks=pytest.mark.slow),
        ("contiguous", Mask(window=CHUNK + 2), 2),
        pytest.param("contiguous", Mask(window=3 * CHUNK), 3, marks=pytest.mark.slow),
        ("contiguous", Mask(causal=False, window=CHUNK), 2),
        pytest.param("contiguous", Mask(window=10**6), 7, marks=pytest.mark.slow),
        ("zigzag", Mask(window=CHUNK + 1), 1),
        pytest.param("zigzag", Mask(window=2 * CHUNK), 2, marks=pytest.mark.slow),
        ("zigzag", Mask(causal=False, window=CHUNK), 2),
    ],
)
def test_a_window_shortens_the_way_of_the_blocks(mesh_of, layout, mask, hops):
    chunks = {"contiguous": 1, "zigzag": 2}[layout]
    message = ("collective-permute", "f32", (BATCH, KV_HEADS, CHUNK, DIM + VALUE_DIM))
    mesh = mesh_of(8)
    # A block of the zigzag layout goes in halves, one to each side: together no more than a block.
    expected = Counter({message: hops * chunks} if hops else {})
    assert executed(compiled(mesh, CHUNK * chunks, "forward", layout, mask=mask)) == expected
    found = executed(compiled(mesh, CHUNK * chunks, "backward", layout, mask=mask))
    assert found.keys() == expected.keys()
    if layout == "contiguous" or hops == 1 or not mask.causal:
        assert found == expected + expected
    else:
        # Home is several places away: some chunks turn at an end of the line on the way, in messages of their own.
        assert sum(found.values()) == 2 * hops * chunks + 2


BIG_RINGS = Path(__file__).parent / "big_rings.py"


@pytest.fixture(scope="module")
def big_rings():
    """Compiled size and temporary memory of the laps on rings of up to 64 devices, from a process that has them."""
    root = BIG_RINGS.parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, str(BIG_RINGS)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return {(row["kernel"], row["what"], row["ring"]): row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("kernel", ["xla", "cpu"])
@pytest.mark.parametrize("what", ["forward", "backward"])
def test_program_size_does_not_grow_with_the_ring(big_rings, what, kernel):
    small, large = (big_rings[kernel, what, ring] for ring in (8, 64))
    assert small["hops"] > 0
    assert large["characters"] < 1.1 * small["characters"]


@pytest.mark.parametrize("kernel", ["xla", "cpu"])
def test_memory_depends_on_the_block_and_not_on_the_ring(big_rings, kernel):
    forward, backward = (
        [big_rings[kernel, what, ring]["temporary_bytes"] for ring in (2, 3, 4, 5, 8, 64)]
        for what in ("forward", "backward")
    )
    assert 0 < max(forward) <= 1.05 * min(forward), forward
    assert 0 < max(backward) <= 1.05 * min(backward[1:]), backward
    # With 2 devices no block is under way while another is at work: they need less, by a few blocks.
    block = 512 * 2 * (16 + 16) * 4
    assert backward[-1] - backward[0] <= 4 * block, backward


@pytest.mark.parametrize("wrap", ["scan", "checkpoint"])
def test_a_caller_who_scans_or_checkpoints_keeps_no_tiles(mesh_of, wrap):
    """jax looks inside for what it can compute beforehand: kept, that would be masks and weights of all pairs."""

    def loss(x, segments):
        def attend(x):
            return ring_attention(x, x, x, mesh=mesh_of(1), segment_ids=segments, kernel=XlaKernel(64, 64))

        if wrap == "scan":
            return jax.lax.scan(lambda x, scale: (attend(x * scale), None), x, jnp.ones(3))[0].sum()
        return jax.checkpoint(lambda x: attend(attend(x)))(x).sum()

    def temporary_bytes(length):
        x, segments = jnp.zeros((1, length, 2, 8)), jnp.zeros((1, length), jnp.int32)
        plan = jax.jit(jax.grad(loss)).lower(x, segments).compile().memory_analysis()
        assert plan is not None
        return plan.temp_size_in_bytes

    quarter, half, whole = (temporary_bytes(length) for length in (1024, 2048, 4096))
    assert whole - half <= 2.1 * (half - quarter), (quarter, half, whole)
