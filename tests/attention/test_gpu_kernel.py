"""The kernel for NVIDIA GPUs, interpreted: where test_kernels.py does not go, inside the ring, and under vmap."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import relative_error

from ringjax.attention import Mask, ring_attention
from ringjax.attention.kernels import GpuKernel, Gradients, Lead, Order, Relation, XlaKernel, all_slots
from ringjax.attention.kernels.gpu_visits import Extent, visits
from ringjax.attention.mask import Tokens, visible
from ringjax.attention.scores import Heads, ScoreRule
from ringjax.attention.softmax import Partial

pytestmark = [pytest.mark.spread, pytest.mark.usefixtures("quick_compiler")]

# Tiles that do not divide the blocks of the problems below, and several of them.
SMALL = GpuKernel(q_tile=8, k_tile=4, interpret=True)
BARS = {"out": 2e-6, "lse": 2e-6, "dq": 1e-5, "dk": 1e-5, "dv": 1e-5, "dsinks": 1e-5}
TINY = {"seq": 24, "batch": 1, "heads": 2, "kv_heads": 1, "dim": 4, "value_dim": 4}


def run(case, mesh_of, ring, layout, kernel):
    """Errors through the ring, on a mesh with an axis that it does not use.

    There, jax does not check which values differ between devices (see `GlobalProgram`), and its interpreter of
    kernels fails under that check: it pads blocks with constants. Programs for GPUs are compiled under it, in
    test_gpu_programs.py.
    """
    return case.errors(case.run(ring, layout, kernel, mesh=mesh_of(ring, stage=1)))


@pytest.mark.parametrize(
    ("ring", "layout", "what"),
    [
        (1, "contiguous", {"mask": Mask(window=5, prefix_length=3), "dim": 20, "value_dim": 5, "seq": 19}),
        (2, "zigzag", {"packed": True, "batch": 2, "heads": 4, "kv_heads": 2}),
        (2, "striped", {"softcap": 2.0, "alibi": True, "dropout": 0.2, "with_sinks": True, "batch": 2}),
        (4, "zigzag", {}),
        (4, "contiguous", {"mask": Mask(window=9)}),
        pytest.param(
            *(2, "zigzag", {"mask": Mask(causal=False, window=20), "placed": "shuffled"}), marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_the_ring_equals_the_oracle(problem, mesh_of, ring, layout, what):
    errors = run(problem(**{**TINY, **what}), mesh_of, ring, layout, SMALL)
    assert all(error <= BARS[name] for name, error in errors.items()), errors


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_half_precision_is_as_exact_as_the_specification(problem, mesh_of, dtype):
    case = problem(**{**TINY, "seq": 32, "dim": 16}, dtype=dtype)
    mine, theirs = (run(case, mesh_of, 1, "zigzag", kernel) for kernel in (SMALL, XlaKernel(q_tile=16, k_tile=4)))
    assert all(mine[name] <= max(1.25 * theirs[name], BARS[name]) for name in mine), (mine, theirs)


def test_inside_a_vmap_over_a_mesh_axis(mesh_of):
    """As in stages of a pipeline."""
    mesh = mesh_of(2, stage=2)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 1, 16, heads, 4)), jnp.float32) for heads in (2, 1, 1))

    def loss(q, k, v, kernel):
        def stage(q, k, v):
            return ring_attention(q, k, v, mesh=mesh, kernel=kernel)

        return (jax.vmap(stage, spmd_axis_name="stage")(q, k, v) ** 2).sum()

    value_and_grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)), static_argnums=3)
    (value, gradients), (want, want_gradients) = (value_and_grad(q, k, v, kernel) for kernel in (SMALL, XlaKernel()))
    assert relative_error(value, want) < 2e-6
    for mine, theirs in zip(gradients, want_gradients, strict=True):
        assert relative_error(mine, theirs) < 1e-5


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize(
    ("mask", "order", "lead", "packed"),
    [
        (Mask(), Order.ALL, Lead(), False),
        (Mask(), Order.ALL, Lead(), True),
        (Mask(), Order.SLOTS, Lead(), False),
        (Mask(window=6), Order.SLOTS, Lead(3, 2, -2, 2), False),
        (Mask(window=11), Order.SLOTS, Lead(1, 9, 9, 9), False),
        (Mask(window=3), Order.SLOTS, Lead(1, -40, -40, -40), False),
        (Mask(causal=False, window=7), Order.SLOTS, Lead(1, 3, 3, 3), False),
        (Mask(causal=False, window=7), Order.SLOTS, Lead(1, 3, 3, 3), True),
        (Mask(window=12, prefix_length=3), Order.ANY, Lead(), True),
        (Mask(causal=False, window=12), Order.ANY, Lead(), False),
    ],
)
def test_every_visible_pair_is_visited_once_and_clear_pairs_hide_nothing(mask, order, lead, packed, by_keys):
    q, k = Extent(22, 4), Extent(27, 5)
    rng = np.random.default_rng(0)
    relation, seen = relation_of(rng, mask, order, lead, packed, q, k)
    bounds, order_of_tiles = visits(relation, q, k, by_keys)
    own, other = (k, q) if by_keys else (q, k)
    assert bounds.shape[1:] == (own.tiles, 4)
    for sequence, tile in np.ndindex(2, own.tiles):
        first, clear, rest, end = (int(x) for x in np.broadcast_to(bounds, (2, own.tiles, 4))[sequence, tile])
        assert 0 <= first <= clear <= rest <= end <= other.tiles
        walked = np.arange(other.tiles)
        if order_of_tiles is not None:
            walked = np.broadcast_to(order_of_tiles, (2, own.tiles, other.tiles))[sequence, tile]
            assert sorted(walked) == list(range(other.tiles))
        pairs = seen[sequence].T if by_keys else seen[sequence]
        rows = pairs[tile * own.tile : (tile + 1) * own.tile]
        for place, at in enumerate(walked):
            part = rows[:, at * other.tile : (at + 1) * other.tile]
            if clear <= place < rest:
                assert part.all()
                assert by_keys or part.shape[1] == other.tile
            elif not first <= place < end:
                assert not part.any()


def relation_of(rng, mask, order, lead, packed, q, k):
    """A relation of two sequences, and what it lets be seen, [2, Lq, Lk]."""

    def tokens(side):
        positions = np.sort(rng.integers(0, 20, (2, side.length))) if order is Order.ANY else None
        segments = np.sort(rng.integers(-1, 3, (2, side.length))) if packed else None
        return Tokens(*(None if x is None else jnp.asarray(x, jnp.int32) for x in (positions, segments)))

    of_q, of_k = tokens(q), tokens(k)
    relation = Relation(mask, order, lead, of_q, of_k)
    if order is Order.SLOTS:
        of_q = of_q._replace(positions=(lead.stride * jnp.arange(q.length) + lead.by)[None])
        of_k = of_k._replace(positions=(lead.stride * jnp.arange(k.length))[None])
    of_q, of_k = jax.tree.map(lambda x: x[:, :, None], of_q), jax.tree.map(lambda x: x[:, None], of_k)
    seen = visible(mask, of_q, of_k)
    return relation, np.broadcast_to(True if seen is None else seen, (2, q.length, k.length))


def test_tiles_that_triton_cannot_have_are_refused():
    for tile in (8, 48):
        with pytest.raises(ValueError, match="power of two"):
            GpuKernel(q_tile=tile)


def test_broken_values_reach_no_gradient_of_those_who_do_not_see_them():
    length, dim = 12, 4
    tokens = Tokens(segments=jnp.repeat(jnp.arange(3), 4)[None])
    relation = Relation(Mask(causal=False), Order.ALL, Lead(), tokens, tokens)
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.normal(size=(4, 1, 1, length, dim)).astype(np.float32)
    q[..., 0, 0], k[..., 5, 1], dout[..., 1, 2] = np.nan, np.inf, -np.inf  # in the first two documents
    rows = jnp.zeros((1, 1, 1, length))
    kernel = GpuKernel(q_tile=8, k_tile=8, interpret=True)
    q, dout, kv = jnp.asarray(q[:, :, None]), jnp.asarray(dout[:, :, None]), jnp.concatenate([k, v], -1)
    nothing, slots = Gradients(jnp.zeros(q.shape), jnp.zeros(kv.shape)), all_slots(length)
    rest = relation, ScoreRule(0.5), Heads(), rows + 3, rows, dout, nothing, slots, slots
    dq, dkv = kernel.backward(q, kv, *rest)
    for gradient in (dq, *jnp.split(dkv, 2, -1)):
        gradient = np.asarray(gradient).reshape(length, dim)
        assert np.isfinite(gradient[8:]).all()
        assert np.isnan(gradient[:4]).any()


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")  # since jax 0.12
def test_every_feature_lowers_to_triton_without_a_gpu():
    """What Triton's compiler makes of it is checked in test_gpu_programs.py."""
    length, dim, value_dim, kernel, rule = 1000, 80, 24, GpuKernel(), ScoreRule(0.1, 20.0, 0.1, True)

    def like(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def run(q, kv, out, lse, dout, numbers, slopes):
        tokens = Tokens(numbers, numbers)
        relation, heads = (
            Relation(Mask(window=300), Order.ANY, Lead(), tokens, tokens),
            Heads(slopes, slopes.view("u4")),
        )
        slots = all_slots(length), all_slots(length)
        part = kernel.forward(q, kv, relation, rule, heads, Partial(out, lse), *slots)
        sums = Gradients(*(x.astype(jnp.float32) for x in (q, kv)))
        return part, kernel.backward(q, kv, relation, rule, heads, lse, lse, dout, sums, *slots)

    before = like(1, 2, 4, length, value_dim, dtype="float32"), like(1, 2, 4, length, dtype="float32")
    q, kv = like(1, 2, 4, length, dim), like(1, 2, length, dim + value_dim)
    inputs = q, kv, *before, like(1, 2, 4, length, value_dim), like(1, length, dtype="int32")
    with an_abstract_gpu():
        traced = jax.jit(run).trace(*inputs, like(1, 2, 4, dtype="float32"))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 3


def an_abstract_gpu():
    """Since jax 0.12, lowering asks for the kind of GPU."""
    if jax.__version_info__ < (0, 12):
        return contextlib.nullcontext()
    gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=gpu))
