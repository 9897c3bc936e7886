"""The TPU kernel in interpret mode: what `test_kernels` leaves out, and the ring around it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.attention import Mask, ring_attention
from ringjax.attention.kernels import TpuKernel, XlaKernel
from ringjax.attention.scores import ScoreRule

pytestmark = [pytest.mark.spread, pytest.mark.usefixtures("quick_compiler")]

# Several tiles each way, of which the last ones hang over; both heads of a group in one step, or one.
SMALL = TpuKernel(q_tile=5, k_tile=7, interpret=True)
NARROW = TpuKernel(q_tile=6, k_tile=6, rows=6, interpret=True)
BARS = {"out": 2e-6, "lse": 2e-6, "dq": 1e-5, "dk": 1e-5, "dv": 1e-5}


@pytest.mark.parametrize(
    ("ring", "layout", "kernel", "options"),
    [
        (1, "contiguous", NARROW, {"softcap": 2.0, "alibi": True, "dropout": 0.2, "value_dim": 6, "packed": True}),
        (2, "zigzag", SMALL, {"packed": True}),
        (2, "zigzag", SMALL, {"mask": Mask(window=7)}),
        pytest.param(4, "contiguous", SMALL, {}, marks=pytest.mark.slow),
        (3, "striped", NARROW, {"mask": Mask(window=9), "alibi": True}),
        (2, "contiguous", SMALL, {"mask": Mask(causal=False, window=5, prefix_length=6)}),
        pytest.param(2, "zigzag", SMALL, {"mask": Mask(window=20), "placed": "shuffled"}, marks=pytest.mark.slow),
    ],
)
def test_the_ring_equals_the_oracle(problem, mesh_of, ring, layout, kernel, options):
    case = problem(seq=24, batch=1, heads=4, kv_heads=2, **options)
    # An axis more, and jax does not check which values differ between devices: pallas' interpreter fails that check.
    errors = case.errors(case.run(ring, layout, kernel, mesh=mesh_of(ring, unused=1)))
    assert all(error <= BARS[name] for name, error in errors.items()), errors


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_half_precision_errs_no_more_than_the_specification(problem, dtype):
    case = problem(seq=24, batch=1, dtype=dtype)
    mine, theirs = (case.errors(case.run(1, "contiguous", kernel)) for kernel in (SMALL, XlaKernel()))
    assert all(mine[name] <= max(1.25 * theirs[name], BARS[name]) for name in mine), (mine, theirs)


def test_nothing_leaves_a_document(problem):
    case = problem(seq=24, batch=1, packed=True)
    before = case.run(2, "zigzag", SMALL)
    document = case.segments == 2
    assert document.any()
    arrays = [x.copy() for x in case.inputs]
    for x, value in zip(arrays, (np.nan, np.inf, -np.inf, np.nan, np.nan), strict=True):
        x[document] = value
    broken = problem(seq=24, batch=1, packed=True)
    object.__setattr__(broken, "inputs", tuple(arrays))
    after = broken.run(2, "zigzag", SMALL)
    for name in before:
        np.testing.assert_array_equal(before[name][~document], after[name][~document], err_msg=name)
        assert not np.isfinite(after[name][document]).any(), name


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["one a device", "two a device"])
def test_runs_as_a_pipeline_stage(mesh_of, stages):
    """jax maps a kernel with a table over a dim of 1 by dropping the dim, and over others by a loop."""
    mesh = mesh_of(2, stage=2)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2 * stages, 1, 12, 2, 4)), jnp.float32)
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (2 * stages, 1, 12)), axis=-1), jnp.int32)

    def loss(x, kernel):
        def stage(x, segments):
            return ring_attention(x, x, x, mesh=mesh, layout="zigzag", segment_ids=segments, kernel=kernel)

        return jnp.sin(jax.vmap(stage, spmd_axis_name="stage")(x, segments)).sum()

    with jax.set_mesh(mesh):
        got, want = (
            jax.jit(jax.value_and_grad(loss), static_argnums=1)(x, kernel) for kernel in (SMALL, XlaKernel())
        )
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], atol=1e-5)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_lowers_for_tpus_where_jax_checks_what_differs_between_devices(mesh_of, layout):
    """The check is on where no tokens are data: the kernel has to say how its results differ."""
    mesh = mesh_of(2)
    x = jax.ShapeDtypeStruct((1, 512, 2, 128), jnp.bfloat16)

    def loss(x):
        return ring_attention(x, x, x, mesh=mesh, layout=layout, kernel=TpuKernel()).astype(jnp.float32).sum()

    text = jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=("tpu",)).as_text()
    for name in ("forward", "dq", "dkv"):
        assert f"attention_{name}" in text


def test_tiles_must_fill_registers():
    with pytest.raises(ValueError, match=r"q_tile must be a positive multiple of 128.*got 100"):
        TpuKernel(q_tile=100)


def test_blocks_of_too_many_tiles_are_refused():
    x = jax.ShapeDtypeStruct((1, 2**19, 1, 128), jnp.bfloat16)
    mesh = jax.make_mesh((1,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ValueError, match="give it larger tiles"):
        jax.eval_shape(lambda x: ring_attention(x, x, x, mesh=mesh, kernel=TpuKernel()), x)


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((8192, 4, 128), "bfloat16", (512, 1024, 4)),
        ((8192, 4, 128), "float32", (512, 512, 4)),
        ((8192, 1, 64), "bfloat16", (512, 1024, 1)),
        ((8192, 32, 128), "bfloat16", (512, 1024, 4)),
        ((768, 6, 128), "bfloat16", (384, 768, 3)),
        ((200, 2, 128), "bfloat16", (200, 200, 2)),
    ],
)
def test_tiles_fit_the_block_and_the_memory(shape, dtype, expected):
    length, group, dim = shape
    q = jax.ShapeDtypeStruct((1, 1, group, length, dim), dtype)
    kv = jax.ShapeDtypeStruct((1, 1, length, 2 * dim), dtype)
    assert TpuKernel()._tiles(q, kv, ScoreRule(1.0), 0, length, length) == expected  # type: ignore[arg-type]


def test_what_else_takes_memory_makes_tiles_smaller_on_tpus_that_have_little():
    q = jax.ShapeDtypeStruct((1, 1, 4, 8192, 128), "bfloat16")
    kv = jax.ShapeDtypeStruct((1, 1, 8192, 256), "bfloat16")

    def tiles(kind, *changes):
        rule, given = ScoreRule(1.0, *changes), 1 if not changes else 0
        return TpuKernel.of(kind)._tiles(q, kv, rule, given, 8192, 8192)  # type: ignore[arg-type]

    assert tiles("TPU v4") == tiles("TPU v4", 5.0) == (512, 512, 4)
    assert tiles("TPU v5") == tiles("TPU v5 lite") == tiles("TPU7x") == tiles("TPU v5", 5.0) == (512, 1024, 4)
    assert TpuKernel.of("") == TpuKernel()
