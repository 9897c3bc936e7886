"""Memory of the whole train step on each device, as XLA plans it: flat in the ring, linear in the sequence."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from ringjax.config import Config, MeshConfig, ModelConfig, TrainConfig
from ringjax.optim import build_optimizer
from ringjax.parallel import activation_sharding, make_mesh
from ringjax.training.state import abstract_state, build_decoder
from ringjax.training.step import make_train_step

MODEL = ModelConfig(layers=2, dim=64, heads=4, kv_heads=2, head_dim=16, mlp_dim=192, loss_chunk=128)
LEAVES = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), jnp.int32) | {"weights": jnp.float32}


def temporary_bytes(length: int, remat: str = "block", model: ModelConfig = MODEL, **axes: int) -> int:
    """Of the compiled step, packed documents included; `length` tokens on each device of the ring."""
    config = Config(
        mesh=MeshConfig.model_validate(axes), model=model, train=TrainConfig.model_validate({"remat": remat})
    )
    shape = (1, length * config.mesh.seq)
    mesh = make_mesh(config.mesh)
    optimizer, schedule = build_optimizer(config.optim, 10)
    with jax.set_mesh(mesh):
        state = abstract_state(config, 256, optimizer, mesh)
        definition, _ = nnx.split(nnx.eval_shape(lambda: build_decoder(config, 256)))
        place = activation_sharding(mesh, "rows", "seq")
        batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=place) for name, dtype in LEAVES.items()}
        placed = jax.tree.map(lambda leaf: leaf.sharding, state)
        step = jax.jit(
            make_train_step(definition, optimizer, schedule, 1), donate_argnums=0, out_shardings=(placed, None)
        )
        plan = step.lower(state, batch).compile().memory_analysis()
    assert plan is not None
    return plan.temp_size_in_bytes


@pytest.mark.slow
def test_it_does_not_grow_with_the_ring():
    found = [temporary_bytes(2048, seq=ring) for ring in (2, 4, 8, 32)]
    assert max(found) <= 1.1 * min(found), found


@pytest.mark.parametrize("remat", ["block", pytest.param("none", marks=pytest.mark.slow)])
def test_it_is_linear_in_the_sequence(remat):
    # From half to the whole sequence as much again as from a quarter to half.
    quarter, half, whole = (temporary_bytes(length, remat) for length in (2048, 4096, 8192))
    assert whole - half <= 2.1 * (half - quarter), (quarter, half, whole)


@pytest.mark.slow
def test_what_is_recomputed_or_cut_into_chunks_takes_no_memory():
    found = [temporary_bytes(4096, remat) for remat in ("none", "attention", "block", "full")]
    assert found == sorted(found, reverse=True), found
    wide = MODEL.model_copy(update={"mlp_dim": 2048})
    hidden = 4096 * 2048 * 4
    chunked = temporary_bytes(4096, model=wide.model_copy(update={"mlp_chunk": 512}))
    assert chunked <= temporary_bytes(4096, model=wide) - hidden
