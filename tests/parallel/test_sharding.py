"""The sharding table: names in, specs out; mistakes are errors; weights at rest stay in pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hlo import shapes
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ringjax.config import MeshConfig
from ringjax.parallel import activation_sharding, constrain, gather, make_mesh, state_shardings, stored, used


def test_parameters_are_stored_over_fsdp_and_the_ring():
    assert stored(("layers", "embed", "mlp")) == PartitionSpec("stage", ("fsdp", "seq"), "tensor")
    assert stored(("vocab", "embed")) == PartitionSpec("tensor", ("fsdp", "seq"))
    assert stored(("heads", "head_dim", "embed")) == PartitionSpec("tensor", None, ("fsdp", "seq"))


def test_activations_are_used_over_batch_and_sequence():
    assert used(("batch", "seq", "embed")) == PartitionSpec(("data", "fsdp"), "seq", None)
    assert used(("batch", "seq", "kv_heads", "head_dim")) == PartitionSpec(("data", "fsdp"), "seq", "tensor", None)
    assert used(("embed", "mlp")) == PartitionSpec(None, "tensor")
    assert used(("batch", None)) == PartitionSpec(("data", "fsdp"), None)


@pytest.mark.parametrize("spec", [stored, used])
def test_unknown_and_doubly_used_names(spec):
    with pytest.raises(ValueError, match="unknown dim 'width'; the dims are batch, rows, seq"):
        spec(("batch", "width"))
    with pytest.raises(ValueError, match="'heads' and 'mlp' are both spread over mesh axis 'tensor'"):
        spec(("heads", "mlp"))


def test_constrain_without_a_mesh_returns_its_argument():
    x = jnp.ones((4, 8))
    assert constrain(x, "batch", "seq") is x
    with pytest.raises(ValueError, match="needs 2 dim names"):
        constrain(x, "batch")


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, lambda f: jax.jit(jax.vmap(f, in_axes=2, out_axes=2))])
def test_constrain_places_eagerly_in_jit_and_in_vmap(wrap):
    mesh = make_mesh(MeshConfig(data=2, seq=4))
    with jax.set_mesh(mesh):
        x = jnp.ones((4, 8, 2))
        y = wrap(lambda x: constrain(x, *("batch", "seq", None)[: x.ndim]))(x)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("data", "seq")), 3)


def test_a_mesh_without_some_axes_is_served_with_those_it_has():
    mesh = jax.make_mesh((4,), ("seq",), axis_types=(AxisType.Auto,))
    assert activation_sharding(mesh, "batch", "seq", "heads").spec == PartitionSpec(None, "seq", None)


def test_gather_brings_the_weight_together_and_leaves_its_gradient_in_pieces():
    mesh = make_mesh(MeshConfig(fsdp=2, seq=2))
    at_rest = NamedSharding(mesh, stored(("embed", "mlp")))

    def loss(weight, x):
        return (constrain(x @ gather(weight, "embed", "mlp"), "batch", "seq", "mlp") ** 2).sum()

    with jax.set_mesh(mesh):
        weight = jax.device_put(jnp.arange(96.0).reshape(8, 12), at_rest)
        x = jax.device_put(jnp.ones((2, 4, 8)), activation_sharding(mesh, "batch", "seq", "embed"))
        compiled = jax.jit(jax.grad(loss)).lower(weight, x).compile()
        gradient = compiled(weight, x)
    assert gradient.sharding.is_equivalent_to(at_rest, 2)
    assert set(shapes(compiled, "all-gather")) == {(8, 12)}
    np.testing.assert_allclose(
        gradient, jax.grad(loss)(np.asarray(weight), np.ones((2, 4, 8), np.float32)), rtol=1e-6
    )


def parameters():
    return nnx.State(
        {
            "scale": nnx.Param(jnp.ones((2, 8)), dims=("layers", "embed")),
            "weight": nnx.Param(jnp.ones((2, 8, 6)), dims=("layers", "embed", "mlp")),
        }
    )


def test_state_shardings_of_parameters_and_their_moments():
    mesh = make_mesh(MeshConfig(fsdp=2, seq=2, tensor=2))
    state = (parameters(), optax.adam(1e-3).init(parameters()))
    placed = jax.device_put(state, state_shardings(jax.eval_shape(lambda: state), mesh))
    for params in (placed[0], placed[1][0].mu, placed[1][0].nu):
        assert {s.data.shape for s in params["weight"][...].addressable_shards} == {(2, 2, 3)}
        assert {s.data.shape for s in params["scale"][...].addressable_shards} == {(2, 2)}
    assert placed[1][0].count.sharding.is_fully_replicated


def test_an_indivisible_parameter_is_named():
    mesh = make_mesh(MeshConfig(seq=3))
    with pytest.raises(ValueError, match=r"\['scale'\].*'embed' of size 8 .* fsdp, seq .* multiple of their 3"):
        state_shardings(parameters(), mesh)
