"""What the compiled program sends and holds, read from its text."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from hlo import executed

from ringjax.attention import ring_attention
from ringjax.attention.kernels import XlaKernel

BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 4, 2, 8, 16


def compiled(mesh, length, what, layout="zigzag", packed=False):
    """Forward lap, or backward lap with the forward's residuals as input, at L tokens a device."""
    seq = length * mesh.shape["seq"]
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "seq"))

    def zeros(heads, dim):
        return jax.device_put(jnp.zeros((BATCH, seq, heads, dim)), sharding)

    def forward(q, k, v):
        kernel = XlaKernel(q_tile=16, k_tile=8)
        return ring_attention(q, k, v, mesh=mesh, layout=layout, segment_ids=segments, kernel=kernel)

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


def test_program_size_does_not_grow_with_the_ring(mesh_of):
    texts = [compiled(mesh_of(ring), 16, "backward").as_text() or "" for ring in (4, 8)]
    assert texts[0].count("collective-permute(") > 0
    assert len(texts[1]) < 1.1 * len(texts[0])


def test_memory_depends_on_the_block_and_not_on_the_ring(mesh_of):
    for what in ("forward", "backward"):
        plans = [compiled(mesh_of(ring), 64, what).memory_analysis() for ring in (4, 8)]
        small, large = (plan.temp_size_in_bytes for plan in plans if plan is not None)
        assert 0 < large <= 1.05 * small
