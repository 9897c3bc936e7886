"""What devices send each other in one train step: kinds, axes and bytes, from the sizes of the model.

Letters as everywhere: B, S, H, D, K, M, F, V, N, R; L tokens of a row on one device, b rows of a microbatch on it.
Exact, and so also of what is not the least that could travel:

- The tied table is gathered twice, for the lookup and for the head, rather than held through all layers; its two
  gradients are summed over the devices one by one.
- Layers of a pipeline are gathered once in the forward pass, but at every tick in the backward pass, and there their
  gradients are summed over the devices at every tick too.
- XLA for CPU reduces by all-reduce where a piece is kept and a reduce-scatter would do; sums gradients over the ring
  and over the rows' devices in two all-reduces, one after the other; and sums over "tensor" what comes back through
  q, k, v, gate and up one by one. XLA for TPU makes one reduction of the second and two sums of the third; it has
  reduce-scatters on meshes without "data", and all-reduces on those with it.
"""

import math
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ringjax.config import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from ringjax.optim import build_optimizer
from ringjax.parallel import AXES, Schedule, activation_sharding, make_mesh, read_collectives, traffic
from ringjax.training.state import abstract_state, build_decoder
from ringjax.training.step import make_train_step

# All different, so that shapes can be told apart, and such that two devices of every axis can share them.
MODEL = ModelConfig(layers=4, dim=32, heads=8, kv_heads=4, head_dim=6, mlp_dim=40, vocab_size=48, loss_chunk=5)
DATA = DataConfig(batch=16, seq_len=56)
LEAVES = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), jnp.int32) | {"weights": jnp.float32}


def case(axes, remat="block"):
    """A run's settings, of which only shapes matter here."""
    train = TrainConfig.model_validate({"remat": remat})
    return Config(mesh=MeshConfig.model_validate(axes), model=MODEL, data=DATA, train=train)


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


def expected(config):
    """Bytes by kind and axes, without scalars and what the ring's hops carry of the tokens besides."""
    model, size = config.model, config.mesh.model_dump()
    B, S, V, N, M = config.data.batch, config.data.seq_len, model.vocab_size, model.layers, model.dim
    H, K, D, F = model.heads, model.kv_heads, model.head_dim, model.mlp_dim
    R, T, stages = size["seq"], size["tensor"], size["stage"]
    rows = B // (size["data"] * size["fsdp"])
    L, b = S // R, rows // config.microbatches
    ticks = Schedule(stages, config.train.rounds, config.microbatches).ticks
    own = N // stages  # layers of a device
    runs = ticks * own  # of one of them; those in the bubble work as well

    layer = (2 * (H + K) * D * M + 3 * M * F) // T + 2 * M  # weights in use, norms included
    ends = 2 * V * M // T + M  # the tied table, for the lookup and for the head, and the last norm

    total = Counter()

    def send(kind, axes, elements):
        axes = tuple(axis for axis in axes if size[axis] > 1)
        if axes and elements:
            total[kind, axes] += 4 * elements

    # Weights: gathered in the forward pass, once whatever the ticks, and where the backward pass runs a layer again.
    send("all-gather", ("fsdp", "seq"), (own + runs) * layer + ends)
    # Gradients: summed at every tick over the rows' devices and the ring; those of the ends also over the stages.
    send("all-reduce", ("data", "fsdp"), runs * layer)
    send("all-reduce", ("stage", "data", "fsdp"), ends)
    send("all-reduce", ("seq",), runs * layer + ends)
    # The ring: keys with values forwards and backwards, and their gradients, R - 1 hops each. A replayed lap begins
    # with the same hop as the lap of the backward pass: it is made once.
    hops = {"block": 3 * (R - 1), "full": 4 * (R - 1) - 1}[config.train.remat]
    send("collective-permute", ("seq",), hops * runs * b * L * K * 2 * D // T)
    # Tensor: what attention and the MLP give; the first of them again in the backward pass; what comes back through
    # q, k, v, gate and up. Then the lookup, and in chunks of the loss a maximum and two sums a token and what comes
    # back through the head.
    send("all-reduce", ("tensor",), (2 + 1 + 5) * runs * b * L * M)
    tokens = rows // stages * L
    chunks = math.ceil(tokens / model.loss_chunk)
    send("all-reduce", ("tensor",), tokens * M + chunks * math.ceil(tokens / chunks) * (3 + M))
    # Stages: at a tick, what they made and what waits, forwards and backwards. Positions and documents: once.
    send("collective-permute", ("stage",), 2 * 2 * ticks * b * L * M)
    send("all-gather", ("stage",), 2 * rows * L)
    return dict(total)


def weights_in_use(config):
    """Shapes of what may be gathered over the ring."""
    model, T = config.model, config.mesh.tensor
    M, D, F, V = model.dim, model.head_dim, model.mlp_dim // T, model.vocab_size // T
    H, K = model.heads // T, model.kv_heads // T
    return {(M, H, D), (M, K, D), (H, D, M), (M, F), (F, M), (V, M), (M,)}


@pytest.mark.parametrize(
    "config",
    [*(case({axis: 2}) for axis in AXES), case(dict.fromkeys(AXES, 2)), case({"seq": 4}, remat="full")],
    ids=[*AXES, "all", "seq4 full"],
)
def test_only_what_each_axis_needs(config):
    found, leaves = sent(config)
    scalars = [one for one in found if not one.shape]
    documents = [one for one in found if (one.kind, one.dtype) == ("collective-permute", "s32")]
    floats = [one for one in found if one not in scalars and one not in documents]
    assert traffic(floats) == expected(config)
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
