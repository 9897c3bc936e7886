"""The operator against the float64 oracle: forward, lse and every gradient."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.attention import Mask, get_layout, ring_attention
from ringjax.attention.kernels import XlaKernel

# Tiles far smaller than a block, that do not divide it: every loop, mask and filled tile of the kernel is at work.
SMALL = XlaKernel(q_tile=10, k_tile=4)
BARS = {"out": 2e-6, "lse": 2e-6, "dq": 1e-5, "dk": 1e-5, "dv": 1e-5}
LAYOUTS = ("contiguous", "zigzag", "striped")
HEADS = {"mha": (3, 3), "gqa": (4, 2), "mqa": (3, 1)}


def check(problem, ring, layout, kernel: str | XlaKernel = SMALL, **more):
    """Every result of a problem is within the float32 bars."""
    errors = problem.errors(problem.run(ring, layout, kernel, **more))
    assert all(errors[name] <= bar for name, bar in BARS.items()), errors


# Each pair of choices meets in some case: of layout, mask, packing, ring size and heads.
COVERING = [
    ("contiguous", True, False, 4, "gqa"),
    ("contiguous", False, True, 2, "mqa"),
    ("contiguous", True, True, 3, "mha"),
    ("contiguous", True, True, 1, "gqa"),
    ("zigzag", True, False, 2, "mha"),
    ("zigzag", True, True, 4, "gqa"),
    ("zigzag", True, False, 3, "mqa"),
    ("zigzag", False, True, 3, "gqa"),
    ("zigzag", True, True, 8, "mha"),
    ("striped", True, False, 3, "gqa"),
    ("striped", True, True, 2, "gqa"),
    ("striped", False, False, 4, "mha"),
    ("striped", True, True, 8, "mqa"),
]


@pytest.mark.parametrize(("layout", "causal", "packed", "ring", "heads"), COVERING)
def test_equals_the_oracle(problem, layout, causal, packed, ring, heads):
    heads, kv_heads = HEADS[heads]
    check(problem(causal=causal, packed=packed, heads=heads, kv_heads=kv_heads), ring, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "causal", "packed", "ring", "heads"),
    [
        case
        for case in itertools.product(LAYOUTS, (True, False), (False, True), (1, 2, 3, 4, 8), HEADS)
        if case not in COVERING
    ],
)
def test_equals_the_oracle_in_every_combination(problem, layout, causal, packed, ring, heads):
    heads, kv_heads = HEADS[heads]
    check(problem(causal=causal, packed=packed, heads=heads, kv_heads=kv_heads), ring, layout)


@pytest.mark.parametrize(("ring", "layout"), [(5, "zigzag"), (7, "striped"), (7, "zigzag")])
def test_odd_rings_and_lengths(problem, ring, layout):
    check(problem(seq=70, packed=True), ring, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_structured_inputs_with_large_scores(problem, layout):
    check(problem(structured=True, packed=True), 4, layout)


def test_values_of_another_size_than_keys(problem):
    check(problem(value_dim=5), 4, "zigzag")


def test_one_tile_for_everything(problem):
    check(problem(packed=True), 4, "zigzag", kernel="auto")


def test_a_scale_of_ones_own(problem):
    case = problem(causal=False)
    results = case.run(2, "contiguous", scale=0.5 * case.dim**-0.5)
    q = case.inputs[0] / 2
    halved = problem(causal=False)
    object.__setattr__(halved, "inputs", (q, *case.inputs[1:]))
    errors = halved.errors(results | {"dq": results["dq"] * 2})
    assert all(errors[name] <= bar for name, bar in BARS.items()), errors


@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_on_block_borders_and_one_token_either_side(problem, layout):
    case = problem(packed=True)
    for border in (11, 12, 13):
        segments = np.repeat([[0, 1, 2]], [border, 12, 48 - 12 - border], axis=1).repeat(2, axis=0).astype(np.int32)
        moved = problem(packed=True)
        object.__setattr__(moved, "segments", segments)
        object.__setattr__(moved, "inputs", case.inputs)
        check(moved, 4, layout)


def test_a_device_of_nothing_but_padding(problem):
    case = problem(packed=True)
    segments = np.zeros((2, 48), np.int32)
    segments[:, 24:] = -1  # contiguous, ring of 4: two whole blocks
    object.__setattr__(case, "segments", segments)
    object.__setattr__(case, "inputs", (*case.inputs[:4], case.inputs[4] * (segments >= 0)[..., None]))
    results = case.run(4, "contiguous", SMALL)
    errors = case.errors(results)
    assert all(errors[name] <= bar for name, bar in BARS.items()), errors
    assert (results["out"][:, 24:] == 0).all()
    for name in ("dq", "dk", "dv"):
        assert (results[name][:, 24:] == 0).all(), name
    assert all(np.isfinite(results[name]).all() for name in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_given_as_data_in_any_order(problem, layout):
    # Tokens are dealt to the slots at random; only their positions say what is causal.
    case = problem(packed=True)
    shuffle = np.random.default_rng(2).permutation(48)
    inputs = [x[:, shuffle] for x in case.inputs]
    segments = case.segments[:, shuffle]
    positions = np.broadcast_to(shuffle, (2, 48))
    shuffled = problem(packed=True)
    object.__setattr__(shuffled, "inputs", tuple(inputs))
    object.__setattr__(shuffled, "segments", segments)
    positions = get_layout(layout).permute(positions, 4)
    results = shuffled.run(4, layout, SMALL, positions=positions)
    back = np.argsort(shuffle)
    errors = case.errors({name: x[:, back] for name, x in results.items()})
    assert all(errors[name] <= bar for name, bar in BARS.items()), errors


@pytest.mark.parametrize("ring", [2, 8])
def test_bfloat16_is_as_exact_on_a_ring_as_on_one_device(problem, ring):
    case = problem(dtype="bfloat16", packed=True)
    alone = case.errors(case.run(1, "contiguous"))
    spread = case.errors(case.run(ring, "zigzag"))
    assert all(spread[name] <= 1.25 * alone[name] for name in BARS), (alone, spread)


@pytest.mark.parametrize("axes", [{"data": 2}, {"tensor": 2}, {"data": 2, "tensor": 2}])
def test_other_mesh_axes_share_batch_and_heads(problem, mesh_of, axes):
    check(problem(packed=True), 2, "zigzag", mesh=mesh_of(2, **axes))


def test_axes_of_ones_own_names(problem, mesh_of):
    mesh = jax.make_mesh((2, 4), ("rows", "ring"), (jax.sharding.AxisType.Auto,) * 2)
    check(problem(), 4, "zigzag", mesh=mesh, seq_axis="ring", batch_axes="rows", head_axis=None)


@pytest.mark.parametrize("sharded", [False, True])
def test_meshes_with_explicit_axes(problem, sharded):
    case = problem(packed=True)
    mesh = jax.make_mesh((4,), ("seq",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
    q, k, v = (jnp.asarray(x) for x in case.inputs[:3])
    if sharded:
        spec = jax.sharding.PartitionSpec(None, "seq")
        q, k, v = (jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)) for x in (q, k, v))
    attend = jax.jit(lambda *x: ring_attention(*x, mesh=mesh, segment_ids=case.segments, kernel=SMALL))
    np.testing.assert_allclose(attend(q, k, v), case.answer["out"], rtol=1e-5, atol=1e-6)
    dq = jax.jit(jax.grad(lambda q, k, v: (attend(q, k, v) * case.inputs[3]).sum()))(q, k, v)
    auto = ring_attention_gradient(case)
    np.testing.assert_allclose(dq, auto, rtol=1e-5, atol=1e-6)


def ring_attention_gradient(case):
    """dq of the same on a mesh of Auto axes, without a cotangent of the lse."""
    silent = type(case)(packed=case.packed)
    object.__setattr__(silent, "inputs", (*case.inputs[:4], np.zeros_like(case.inputs[4])))
    return silent.run(4, "contiguous", SMALL)["dq"]


def test_segment_ids_of_numpys_own_type(problem):
    case = problem(packed=True)
    object.__setattr__(case, "segments", case.segments.astype(np.int64))
    check(case, 4, "zigzag")


def test_runs_on_the_current_mesh_inside_jit_scan_and_vmap(problem, mesh_of):
    case = problem(packed=True)
    layout = get_layout("zigzag")
    q, k, v = (layout.permute(x, 4) for x in case.inputs[:3])
    segments = layout.permute(case.segments, 4)

    @jax.jit
    def layers(q, k, v):
        def layer(q, kv):
            return ring_attention(q, *kv, layout="zigzag", segment_ids=segments), None

        return jax.lax.scan(layer, q, (jnp.stack([k, 2 * k]), jnp.stack([v, v])))[0]

    with jax.set_mesh(mesh_of(4)):
        stacked = layers(q, k, v)
        first = ring_attention(q, k, v, layout="zigzag", segment_ids=segments)
        second = ring_attention(first, 2 * k, v, layout="zigzag", segment_ids=segments)
        many = jax.vmap(lambda q: ring_attention(q, k, v, layout="zigzag", segment_ids=segments))(
            jnp.stack([q, 2 * q])
        )
    np.testing.assert_allclose(stacked, second, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(many[0], first, rtol=1e-5, atol=1e-6)


def test_tokens_and_documents_that_may_not_matter_change_no_bit(problem):
    case = problem(packed=True)
    before = case.run(4, "zigzag", SMALL)
    segments = case.segments
    document = (segments == 2) & (np.arange(2)[:, None] == 0)
    assert document.any()
    changed = problem(packed=True)
    q, k, v, dout, dlse = (x.copy() for x in case.inputs)
    for x in (q, k, v):
        x[document] += 1
    object.__setattr__(changed, "inputs", (q, k, v, dout, dlse))
    after = changed.run(4, "zigzag", SMALL)
    for name in before:
        np.testing.assert_array_equal(before[name][~document], after[name][~document], err_msg=name)
        assert (before[name][document] != after[name][document]).any(), name

    future = problem(packed=False)
    cut = 29
    arrays = [x.copy() for x in future.inputs]
    for x in arrays[:3]:
        x[:, cut:] *= -2
    later = problem(packed=False)
    object.__setattr__(later, "inputs", tuple(arrays))
    before, after = future.run(4, "striped", SMALL), later.run(4, "striped", SMALL)
    np.testing.assert_array_equal(before["out"][:, :cut], after["out"][:, :cut])
    np.testing.assert_array_equal(before["lse"][:, :cut], after["lse"][:, :cut])


def test_a_full_mask_ignores_order(problem):
    case = problem(causal=False)
    results = [case.run(4, layout)["out"] for layout in LAYOUTS]
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=1e-5, atol=1e-6)


def test_the_mask_default_is_causal_in_natural_order(problem, mesh_of):
    case = problem()
    q, k, v = case.inputs[:3]
    out = ring_attention(q, k, v, mesh=mesh_of(4))
    np.testing.assert_allclose(out, case.answer["out"], rtol=1e-5, atol=1e-6)
    explicit = ring_attention(q, k, v, mesh=mesh_of(4), mask=Mask(causal=True), layout="contiguous")
    np.testing.assert_array_equal(out, explicit)
