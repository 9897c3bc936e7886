"""What devices send each other in one train step is what the planner says: kinds, axes and bytes, all of them."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ringjax.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from ringjax.optim import build_optimizer
from ringjax.parallel import AXES, activation_sharding, make_mesh, read_collectives, traffic
from ringjax.planner.traffic import traffic as predicted
from ringjax.training.state import abstract_state, build_decoder
from ringjax.training.step import make_train_step

# All different, so that shapes can be told apart, and such that two devices of every axis can share them.
MODEL = ModelConfig(layers=4, dim=32, heads=8, kv_heads=4, head_dim=6, mlp_dim=40, vocab_size=48, loss_chunk=5)
DATA = DataConfig(batch=16, seq_len=56)
LEAVES = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), jnp.int32) | {"weights": jnp.float32}


def case(axes, remat="block", accumulate=1, rounds=1, **model):
    """A run's settings, of which only shapes matter here."""
    train = TrainConfig.model_validate({"remat": remat, "rounds": rounds})
    mesh, optim = MeshConfig.model_validate(axes), OptimConfig(accumulate=accumulate)
    return Config(mesh=mesh, model=MODEL.model_copy(update=model), data=DATA, optim=optim, train=train)


def sent(config):
    """The collectives of the step that the trainer compiles, and how many parameter arrays there are."""
    mesh = make_mesh(config.mesh)
    optimizer, schedule = build_optimizer(config.optim, 10)
    vocab_size = config.model.vocab_size
    with jax.set_mesh(mesh):
        state = abstract_state(config, vocab_size, optimizer, mesh)
        definition, _ = nnx.split(nnx.eval_shape(lambda: build_decoder(config, vocab_size)))
        place, shape = activation_sharding(mesh, "rows", "seq"), (config.data.batch, config.data.seq_len)
        batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=place) for name, dtype in LEAVES.items()}
        placed = jax.tree.map(lambda leaf: leaf.sharding, state)
        step = make_train_step(definition, optimizer, schedule, config.optim.accumulate)
        everywhere = NamedSharding(mesh, PartitionSpec())
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(placed, everywhere))
        text = jitted.lower(state, batch).compile().as_text()
    assert text
    return read_collectives(text, mesh.shape), len(jax.tree.leaves(state.params))


def weights_in_use(config):
    """Shapes of what may be gathered over the ring."""
    model, T = config.model, config.mesh.tensor
    M, D, F, V = model.dim, model.head_dim, model.mlp_dim // T, model.vocab_size // T
    H, K = model.heads // T, model.kv_heads // T
    head = set() if model.tied_embeddings else {(M, V)}
    return {(M, H, D), (M, K, D), (H, D, M), (M, F), (F, M), (V, M), (M,)} | head


@pytest.mark.parametrize(
    "config",
    [
        *(case({axis: 2}) for axis in AXES),
        case(dict.fromkeys(AXES, 2)),
        case({"seq": 4}, remat="full"),
        case({"seq": 4, "tensor": 2}, accumulate=2, window=(6, None), mlp_chunk=20, tied_embeddings=False),
        pytest.param(case({"stage": 2, "seq": 2}, rounds=2), marks=pytest.mark.slow),
        pytest.param(case({"fsdp": 2, "tensor": 2}, remat="none"), marks=pytest.mark.slow),
    ],
    ids=[*AXES, "all", "seq4 full", "parts, windows, chunks", "rounds", "all saved"],
)
def test_only_what_each_axis_needs(config):
    found, leaves = sent(config)
    scalars = [one for one in found if not one.shape]
    documents = [one for one in found if (one.kind, one.dtype) == ("collective-permute", "s32")]
    floats = [one for one in found if one not in scalars and one not in documents]
    assert traffic(floats) == predicted(config, config.model.vocab_size)
    gathered = [one for one in floats if one.kind == "all-gather" and "seq" in (one.axes or AXES)]
    assert {one.shape[one.shape[0] == 1 :] for one in gathered} <= weights_in_use(config)
    assert {one.dtype for one in gathered} <= {"f32"}
    # Two sums of the loss, two norms of the gradient (what is reported, what is clipped) with one sum for each
    # parameter array.
    axes = [axis for axis in AXES if config.mesh.model_dump()[axis] > 1]
    assert {one.kind for one in scalars} <= {"all-reduce"}
    assert sum(one.times for one in scalars) <= (2 + 2 * leaves) * len(axes)
    # One integer a token, at most as often as its keys and values: XLA makes some of these hops once for all layers.
    assert {one.axes for one in documents} <= {("seq",)}
    ring = traffic(floats).get(("collective-permute", ("seq",)), 0)
    assert sum(one.bytes for one in documents) <= ring / (2 * MODEL.kv_heads // config.mesh.tensor * MODEL.head_dim)
