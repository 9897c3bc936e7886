"""The operator inside a caller's own shard_map."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ringjax.attention import Mask, get_layout, ring_attention, ring_attention_shard
from ringjax.attention.kernels import XlaKernel

SMALL = XlaKernel(q_tile=10, k_tile=4)
OPTIONS = {
    "plain": {},
    "window": {"mask": Mask(window=5)},
    "all": {"softcap": 2.0, "dropout_rate": 0.3, "dropout_seed": 1, "mask": Mask(prefix_length=9)},
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_equals_the_operator_over_global_arrays(problem, mesh_of, options, check_vma):
    case, options = problem(packed=True), OPTIONS[options] | {"layout": "zigzag", "kernel": SMALL}
    mesh = mesh_of(2, data=2, tensor=2)
    order = get_layout("zigzag")
    *inputs, dout, _ = (jnp.asarray(order.permute(x, 2)) for x in case.inputs)
    segments = order.permute(case.segments, 2)
    sinks = jnp.arange(4.0)
    full, rows = PartitionSpec("data", "seq", "tensor"), PartitionSpec("data", "seq")

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(full, full, full, rows, PartitionSpec("tensor")),
        out_specs=(full, full),
        check_vma=check_vma,
    )
    def inside(q, k, v, segments, sinks):
        return ring_attention_shard(q, k, v, segment_ids=segments, sinks=sinks, **options, return_lse=True)

    def outside(q, k, v, segments, sinks):
        return ring_attention(q, k, v, segment_ids=segments, sinks=sinks, mesh=mesh, **options, return_lse=True)

    results = []
    for attend in (inside, outside):
        found, pullback = jax.vjp(jax.jit(lambda *x, f=attend: f(*x[:3], segments, x[3])), *inputs, sinks)
        results.append((*found, *pullback((dout, jnp.zeros_like(found[1])))))
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)


def test_what_all_devices_share_gets_the_gradients_of_all(mesh_of):
    # Keys and values are the same for both halves of the batch.
    mesh = mesh_of(4, data=2)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(batch, 16, 2, 4)), jnp.float32) for batch in (2, 1, 1))
    shared, own = PartitionSpec(None, "seq"), PartitionSpec("data", "seq")
    attend = jax.shard_map(
        partial(ring_attention_shard, kernel=SMALL), mesh=mesh, in_specs=(own, shared, shared), out_specs=own
    )

    def together(q, k, v):
        return ring_attention(q, *(jnp.repeat(x, 2, axis=0) for x in (k, v)), mesh=mesh, kernel=SMALL)

    results = [
        jax.jit(jax.value_and_grad(lambda *x, f=f: (f(*x) ** 2).sum(), argnums=(0, 1, 2)))(q, k, v)
        for f in (attend, together)
    ]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), *results)


def test_global_numbers_of_heads_and_sequences_decide_what_is_dropped(mesh_of):
    mesh = mesh_of(2, data=2, tensor=2)
    x = jnp.ones((2, 16, 2, 4)) * jnp.arange(16.0)[:, None, None]
    spec = PartitionSpec("data", "seq", "tensor")
    options = {"dropout_rate": 0.5, "dropout_seed": 0, "kernel": SMALL}
    attend = jax.shard_map(partial(ring_attention_shard, **options), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    out = np.asarray(attend(x, x, x))
    np.testing.assert_allclose(out, ring_attention(x, x, x, mesh=mesh, **options), rtol=1e-6)
    assert not np.allclose(out[0], out[1])
    assert not np.allclose(out[:, :, 0], out[:, :, 1])
    own = partial(ring_attention_shard, dropout_sequences=jnp.array([7]), **options)
    out = np.asarray(jax.shard_map(own, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)(x, x, x))
    np.testing.assert_array_equal(out[0], out[1])
