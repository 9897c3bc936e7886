"""The same model on every mesh: same loss and gradients, weights stored in pieces, only weights gathered."""

from collections import Counter

import jax
import numpy as np
import pytest
from hlo import shapes, weights_in_use

from ringjax.config import MeshConfig
from ringjax.parallel import activation_sharding, make_mesh

RING = {"seq": 4}  # in a ring of 2, XLA merges the hop of a replayed lap with the same hop of the backward lap
MESHES = [{"data": 2}, {"fsdp": 2}, RING, {"tensor": 2}, {"fsdp": 2, "seq": 2, "tensor": 2}]
NAMES = [" ".join(f"{axis}{size}" for axis, size in mesh.items()) for mesh in MESHES]


@pytest.fixture(scope="module")
def alone(tiny, run):
    """Loss and gradients on one device, the batch in natural order."""
    return run(tiny(layout="contiguous"), {})[1:3]


@pytest.fixture(scope="module")
def on_ring(tiny, run):
    """The plain ring: compiled once, looked at by several tests."""
    return run(tiny(), RING)


@pytest.mark.parametrize("sizes", MESHES, ids=NAMES)
def test_loss_and_gradients_equal_one_device(tiny, run, alone, on_ring, sizes):
    compiled, loss, gradients, params = on_ring if sizes == RING else run(tiny(), sizes)
    assert loss == pytest.approx(alone[0], rel=1e-6)
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(alone[1]), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    rows, columns = 32 // (sizes.get("fsdp", 1) * sizes.get("seq", 1)), 48 // sizes.get("tensor", 1)
    for state in (params, gradients):
        assert state["blocks"]["mlp"]["gate"][...].addressable_shards[0].data.shape == (1, 2, rows, columns)
        assert state["norm"]["scale"][...].addressable_shards[0].data.shape == (rows,)
    assert bool(shapes(compiled, "collective-permute")) == (sizes.get("seq", 1) > 1)
    assert not shapes(compiled, "all-to-all")
    assert set(shapes(compiled, "all-gather")) <= weights_in_use(params)


def test_recomputing_a_block_does_not_replay_the_ring(tiny, run, on_ring):
    compiled, loss, gradients, _ = run(tiny(remat="block"), RING)
    plain, plain_loss, plain_gradients, _ = on_ring
    hops = Counter(shapes(compiled, "collective-permute"))
    assert hops == Counter(shapes(plain, "collective-permute"))
    assert len(shapes(compiled, "all-gather")) > len(
        shapes(plain, "all-gather")
    )  # it does recompute: weights come again
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(plain_gradients), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_every_layout_gives_the_same_loss(tiny, alone, layout):
    case = tiny(layout=layout)
    mesh = make_mesh(MeshConfig(seq=4))
    with jax.set_mesh(mesh):
        batch = jax.device_put(case.batch(4), activation_sharding(mesh, "rows", "seq"))
        assert float(jax.jit(case.loss)(case.decoder(), batch)) == pytest.approx(alone[0], rel=1e-6)
