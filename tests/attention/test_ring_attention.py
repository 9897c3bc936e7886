"""The operator against the float64 oracle: forward, lse and every gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringjax.attention import Mask, get_layout, merge_attention, reference_attention, ring_attention
from ringjax.attention.kernels import XlaKernel

# Tiles far smaller than a block, that do not divide it: every loop, mask and filled tile of the kernel is at work.
SMALL = XlaKernel(q_tile=10, k_tile=4)
BARS = {"out": 2e-6, "lse": 2e-6, "dq": 1e-5, "dk": 1e-5, "dv": 1e-5, "dsinks": 1e-5}
LAYOUTS = ("contiguous", "zigzag", "striped")


def check(problem, ring, layout, kernel: str | XlaKernel = SMALL, **more):
    """Every result of a problem is within the float32 bars."""
    errors = problem.errors(problem.run(ring, layout, kernel, **more))
    assert all(error <= BARS[name] for name, error in errors.items()), errors


@pytest.mark.parametrize("layout", LAYOUTS)
def test_structured_inputs_with_large_scores(problem, layout):
    check(problem(structured=True, packed=True), 4, layout)


def test_one_tile_for_everything(problem):
    check(problem(packed=True), 4, "zigzag", kernel="auto")


def test_a_scale_of_ones_own(problem):
    case = problem(mask=Mask(causal=False))
    results = case.run(2, "contiguous", scale=0.5 * case.dim**-0.5)
    q = case.inputs[0] / 2
    halved = problem(mask=Mask(causal=False))
    object.__setattr__(halved, "inputs", (q, *case.inputs[1:]))
    errors = halved.errors(results | {"dq": results["dq"] * 2})
    assert all(error <= BARS[name] for name, error in errors.items()), errors


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
    assert all(error <= BARS[name] for name, error in errors.items()), errors
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
    assert all(error <= BARS[name] for name, error in errors.items()), errors


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("segments", [None, 0])
def test_padding_inside_is_hidden_where_positions_and_segments_are_the_same_numbers(problem, layout, segments):
    """XLA's partitioner has been seen to fill both as it fills the first of them."""
    case = problem(seq=43, mask=Mask(window=5))
    object.__setattr__(case, "positions", np.zeros((2, 43), np.int32))
    object.__setattr__(case, "segments", None if segments is None else np.full((2, 43), segments, np.int32))
    check(case, 4, layout)


@pytest.mark.parametrize("kernel", ["auto", "xla"])
def test_a_second_derivative_is_refused(mesh_of, kernel):
    def loss(x):
        return ring_attention(x, x, x, mesh=mesh_of(2), kernel=kernel).sum()

    with pytest.raises(NotImplementedError, match="a first derivative and no second one"):
        jax.grad(lambda x: jax.grad(loss)(x).sum())(jnp.ones((1, 8, 1, 4)))


def test_the_gradient_of_sinks_that_take_next_to_nothing(problem):
    case = problem(with_sinks=True)
    object.__setattr__(case, "sinks", np.array([-4, -8, -12, 3], np.float32))
    found, want = case.run(2, "zigzag", SMALL)["dsinks"], case.answer["dsinks"]
    np.testing.assert_allclose(found, want, rtol=1e-4)  # each by itself, however small


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


def test_a_full_mask_ignores_order(problem):
    case = problem(mask=Mask(causal=False))
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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True])
def test_queries_of_one_sequence_and_keys_of_another(mesh_of, layout, packed):
    # Neither length divides; keys are sharded like queries.
    rng = np.random.default_rng(0)
    q, dout = (rng.normal(size=(2, 21, 4, 8)).astype(np.float32) for _ in range(2))
    k, v = (rng.normal(size=(2, 35, 2, 8)).astype(np.float32) for _ in range(2))
    segments = np.sort(rng.integers(-1, 3, (2, 21)), axis=1) if packed else None
    kv_segments = np.sort(rng.integers(-1, 3, (2, 35)), axis=1) if packed else None
    order, mask = get_layout(layout), Mask(causal=False)

    def permuted(x):
        return None if x is None else order.permute(x, 4)

    tokens = {"segment_ids": permuted(segments), "kv_segment_ids": permuted(kv_segments)}
    out, pullback = jax.vjp(
        lambda *x: ring_attention(*x, mesh=mesh_of(4), layout=layout, mask=mask, kernel=SMALL, **tokens),
        *map(permuted, (q, k, v)),
    )
    got = [order.unpermute(np.asarray(x), 4) for x in (out, *pullback(jnp.asarray(permuted(dout))))]
    with jax.enable_x64():
        wide = [jnp.asarray(x, jnp.float64) for x in (q, k, v, dout)]
        want, pullback = jax.vjp(
            lambda *x: reference_attention(*x, mask=mask, segment_ids=segments, kv_segment_ids=kv_segments)[0],
            *wide[:3],
        )
        wanted = [np.asarray(x) for x in (want, *pullback(wide[3]))]
    for mine, theirs in zip(got, wanted, strict=True):
        assert np.linalg.norm(mine - theirs) <= 2e-6 * np.linalg.norm(theirs)


def test_cross_attention_by_positions_that_are_given(mesh_of):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, n, 2, 4)).astype(np.float32) for n in (8, 16, 16))
    positions, kv_positions = np.arange(8, 16)[None], np.arange(16)[None]
    out = ring_attention(q, k, v, mesh=mesh_of(4), positions=positions, kv_positions=kv_positions)
    want, _ = reference_attention(q, k, v, positions=positions, kv_positions=kv_positions)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


def test_attention_over_two_sets_of_keys_merges_into_attention_over_both(mesh_of):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(2, 32, heads, 8)).astype(np.float32) for heads in (4, 2, 2, 4)]
    q, k, v, dout = map(jnp.asarray, arrays)
    dlse = jnp.asarray(rng.normal(size=(2, 32, 4)), jnp.float32)
    # Some queries see keys of the first set only, some of none.
    first = np.sort(rng.integers(0, 4, (2, 32)), axis=1)
    whole = np.where(first == 0, -1, 0)
    some, others = np.where(first == 1, 0, -1), np.where(first > 1, 0, -1)
    queries = np.zeros_like(first)

    def over(keys, q, k, v):
        return ring_attention(
            q, k, v, mesh=mesh_of(4), kernel=SMALL, segment_ids=queries, kv_segment_ids=keys, return_lse=True
        )

    def merged(q, k, v):
        return merge_attention(over(some, q, k, v), over(others, q, k, v))

    want, want_back = jax.vjp(lambda *x: over(whole, *x), q, k, v)
    got, got_back = jax.vjp(merged, q, k, v)
    sees = np.isfinite(np.asarray(want[1]))
    assert not sees.all()
    dlse = jnp.where(sees, dlse, 0)
    for mine, theirs in zip((*got, *got_back((dout, dlse))), (*want, *want_back((dout, dlse))), strict=True):
        mine, theirs = (np.where(np.isneginf(x), 0, x) for x in (mine, theirs))
        assert np.linalg.norm(mine - theirs) <= 2e-6 * np.linalg.norm(theirs)


def test_dropout_is_the_same_on_every_mesh_and_layout(problem, mesh_of):
    case = problem(dropout=0.4, mask=Mask(window=30))
    results = [case.run(ring, layout, SMALL) for ring, layout in ((1, "contiguous"), (4, "zigzag"), (3, "striped"))]
    results.append(case.run(2, "zigzag", SMALL, mesh=mesh_of(2, data=2, tensor=2)))
    for other in results[1:]:
        for name, x in other.items():
            np.testing.assert_allclose(x, results[0][name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert not np.allclose(results[0]["out"], case.run(1, "contiguous", SMALL, dropout_seed=4)["out"], atol=1e-2)


def test_dropout_seeds_may_be_keys_and_traced(mesh_of):
    x = jnp.ones((1, 8, 2, 4)) * jnp.arange(8.0)[:, None, None]

    @jax.jit
    def attend(seed):
        return ring_attention(x, x, x, mesh=mesh_of(4), dropout_rate=0.5, dropout_seed=seed)

    outs = [attend(seed) for seed in (jax.random.key(0), jax.random.key(1), jax.random.PRNGKey(0), jnp.uint32(5))]
    assert not np.allclose(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])
    direct = ring_attention(x, x, x, mesh=mesh_of(4), dropout_rate=0.5, dropout_seed=5)
    np.testing.assert_allclose(outs[3], direct, rtol=1e-6)


def test_dropout_knows_sequences_by_the_numbers_given(mesh_of):
    x = jnp.ones((3, 8, 2, 4)) * jnp.arange(8.0)[:, None, None]
    options = {"mesh": mesh_of(2), "dropout_rate": 0.5, "dropout_seed": 5}
    whole, some = ring_attention(x, x, x, **options), np.array([2, 0])
    part = ring_attention(x[some], x[some], x[some], dropout_sequences=some, **options)
    np.testing.assert_allclose(part, whole[some], rtol=1e-6)
    assert not np.allclose(part, whole[:2])


def test_a_remat_policy_by_name_never_replays_the_forward_lap(problem, mesh_of):
    case = problem()
    mesh = mesh_of(4)
    policy = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")

    def loss(q, k, v):
        return jnp.sin(ring_attention(q, k, v, mesh=mesh, kernel=SMALL)).sum()

    def laps(function):
        return count("shard_map", jax.make_jaxpr(jax.grad(function))(*case.inputs[:3]).jaxpr)

    assert laps(loss) == laps(jax.checkpoint(loss, policy=policy)) == 2
    assert laps(jax.checkpoint(loss)) == 3


def count(primitive, jaxpr):
    """Uses of a primitive, at any depth."""
    total = 0
    for equation in jaxpr.eqns:
        total += equation.primitive.name == primitive
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            total += count(primitive, inner) if hasattr(inner, "eqns") else 0
    return total


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vmap_over_packed_documents(problem, mesh_of, layout):
    case = problem(packed=True)
    q, k, v = case.inputs[:3]
    documents = np.stack([case.segments, np.flip(case.segments, axis=0)])

    def attend(segments):
        return ring_attention(q, k, v, mesh=mesh_of(4), layout=layout, segment_ids=segments, kernel=SMALL)

    many = jax.vmap(attend)(jnp.asarray(documents))
    np.testing.assert_allclose(many, np.stack([attend(one) for one in documents]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mask", [Mask(), Mask(window=5)], ids=["causal", "window"])
def test_vmap_along_another_mesh_axis(problem, mesh_of, mask):
    case, mesh = problem(packed=True), mesh_of(4, stage=2)
    segments = jnp.stack([jnp.asarray(case.segments)] * 2)
    arrays = [jnp.stack([jnp.asarray(x), 2 * jnp.asarray(x)]) for x in case.inputs[:3]]

    def attend(q, k, v, segments):
        return ring_attention(q, k, v, mesh=mesh, mask=mask, segment_ids=segments, kernel=SMALL)

    def loss(*arrays, stages):
        return (stages(*arrays, segments) ** 2).sum()

    stages = jax.vmap(attend, spmd_axis_name="stage")
    got = jax.jit(jax.grad(partial(loss, stages=stages), argnums=(0, 1, 2)))(*arrays)
    want = jax.grad(partial(loss, stages=lambda *x: jnp.stack(list(map(attend, *x)))), argnums=(0, 1, 2))(*arrays)
    for mine, theirs in zip(got, want, strict=True):
        assert np.linalg.norm(mine - theirs) <= 1e-5 * np.linalg.norm(theirs)


def test_positions_as_far_apart_as_can_be(mesh_of):
    positions = np.array([[-(2**31), 0, 2**30, 2**31 - 1]], np.int32)
    q = jnp.zeros((1, 4, 1, 4))
    v = jnp.arange(16.0).reshape(1, 4, 1, 4)
    options = {"positions": positions, "alibi_slopes": np.array([0.5], np.float32)}
    for mask in (Mask(), Mask(causal=False), Mask(window=2**31 - 1)):
        out, lse = ring_attention(q, q, v, mesh=mesh_of(2), mask=mask, return_lse=True, **options)
        np.testing.assert_array_equal(out, v)  # everybody else is too far away
        np.testing.assert_array_equal(lse, 0)


@pytest.mark.parametrize("scale", [1e6, 1e9, 1e12])
def test_large_scores_lose_precision_and_nothing_else(problem, scale):
    # Weights stay between 0 and 1: values are averaged, however far the scores are from each other.
    case = problem(value_dim=4)
    q, k, v, dout, dlse = case.inputs
    object.__setattr__(case, "inputs", (q * np.float32(scale), k, v, dout, dlse * 0))
    results = case.run(2, "zigzag", SMALL)
    assert all(np.isfinite(x).all() for x in results.values())
    assert np.abs(results["out"]).max() <= np.abs(v).max()
    seen = np.abs(dout).sum(axis=(1, 2)).max()  # a value gets at most every row's whole cotangent
    assert np.abs(results["dv"]).max() <= seen


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    seq=st.sampled_from([1, 2, 7, 24]),
    ring=st.sampled_from([1, 2, 3]),
    layout=st.sampled_from(LAYOUTS),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 30),
    prefix=st.none() | st.integers(0, 30),
    data=st.data(),
)
def test_any_mask_segments_and_positions(problem, seq, ring, layout, causal, window, prefix, data):
    case = problem(seq=seq, mask=Mask(causal, window, prefix), heads=2, kv_heads=1, dim=4, value_dim=4)

    def tokens(low, high):
        rows = st.lists(st.integers(low, high), min_size=seq, max_size=seq)
        return np.array(data.draw(st.lists(rows, min_size=2, max_size=2)), np.int32)

    segments = data.draw(st.sampled_from([None, "any"])) and tokens(-1, 2)
    positions = data.draw(st.sampled_from([None, "any"])) and tokens(-40, 40)
    object.__setattr__(case, "segments", segments)
    object.__setattr__(case, "positions", positions)
    with_keys = np.isfinite(case_lse(case))
    object.__setattr__(case, "inputs", (*case.inputs[:4], case.inputs[4] * with_keys))
    results, answer = case.run(ring, layout, SMALL), case.answer
    for name, want in answer.items():
        np.testing.assert_allclose(results[name], want, rtol=1e-4, atol=1e-5, err_msg=name)


def case_lse(case):
    """The lse alone, to see which rows have keys."""
    tokens = {"segment_ids": case.segments, "positions": case.positions}
    return np.asarray(reference_attention(*case.inputs[:3], mask=case.mask, **tokens)[1])
