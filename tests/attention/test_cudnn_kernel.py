"""cuDNN as a block kernel, without a GPU: the arithmetic around it, what it refuses, and what is handed to XLA.

cuDNN itself is stood in for by dense attention that rounds what cuDNN rounds. Programs are compiled in
test_gpu_programs.py.
"""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.attention import Mask, ring_attention
from ringjax.attention.kernels import CudnnKernel, Lead, Order, Relation, XlaKernel, get_kernel, jax_private
from ringjax.attention.kernels.cudnn import stand_in
from ringjax.attention.kernels.registry import FirstThatCan
from ringjax.attention.mask import Tokens
from ringjax.attention.scores import ScoreRule

pytestmark = [pytest.mark.spread, pytest.mark.usefixtures("quick_compiler")]

KERNEL = CudnnKernel(exact=XlaKernel())
HEAD = {"seq": 64, "dim": 16, "value_dim": 16, "dtype": "bfloat16"}


def scores(q, k, scale, causal):
    q, k = (x.astype(jnp.float32) for x in (q, k))
    grouped = q.reshape(q.shape[0], k.shape[1], -1, *q.shape[2:])
    s = scale * jnp.einsum("bkgqd,bksd->bkgqs", grouped, k)
    return jnp.where(jnp.tri(*s.shape[-2:], dtype=bool), s, -1e9) if causal else s


def forward(q, k, v, scale, causal):
    s = scores(q, k, scale, causal)
    top = s.max(-1, keepdims=True)
    p = jnp.exp(s - top)
    total = p.sum(-1, keepdims=True)
    rounded = p.astype(q.dtype).astype(jnp.float32)
    out = (jnp.einsum("bkgqs,bksd->bkgqd", rounded, v.astype(jnp.float32)) / total).astype(q.dtype)
    return out.reshape(q.shape), (top + jnp.log(total)).reshape(q.shape[:-1])


def backward(q, k, v, lse, out, dout, scale, causal):
    """As cuDNN: delta from out and dout, weights rounded before the products, gradients rounded."""
    s = scores(q, k, scale, causal)
    split = s.shape[:3]
    lse, dout_f32, out, q_f32 = (x.astype(jnp.float32).reshape(*split, *x.shape[2:]) for x in (lse, dout, out, q))
    p = jnp.exp(s - lse[..., None])
    ds = p * (jnp.einsum("bkgqd,bksd->bkgqs", dout_f32, v.astype(jnp.float32)) - (dout_f32 * out).sum(-1)[..., None])
    p, ds = (x.astype(q.dtype).astype(jnp.float32) for x in (p, ds))
    dq = scale * jnp.einsum("bkgqs,bksd->bkgqd", ds, k.astype(jnp.float32)).reshape(q.shape)
    dk = scale * jnp.einsum("bkgqs,bkgqd->bksd", ds, q_f32)
    dv = jnp.einsum("bkgqs,bkgqd->bksd", p, dout_f32)
    return [x.astype(q.dtype) for x in (dq, dk, dv)]


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(jax_private, "cudnn_forward", forward)
    monkeypatch.setattr(jax_private, "cudnn_backward", backward)


def errors(case, ring, kernel, mesh_of, layout="zigzag"):
    return case.errors(case.run(ring, layout, kernel, mesh=mesh_of(ring, unused=1)))


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=False)], ids=["causal", "full"])
@pytest.mark.usefixtures("emulated")
def test_a_ring_of_one_errs_no_more_than_the_specification(problem, mesh_of, mask):
    """Also in what the cotangent of the lse gives, of which cuDNN knows nothing."""
    case = problem(**HEAD, mask=mask)
    mine, alone = (errors(case, 1, kernel, mesh_of) for kernel in (KERNEL, XlaKernel()))
    assert all(mine[name] <= max(1.25 * alone[name], 2e-6) for name in mine), (mine, alone)


@pytest.mark.usefixtures("emulated")
def test_the_ring_is_right_but_for_the_rounding_of_hops(problem, mesh_of):
    case = problem(**HEAD | {"seq": 256, "batch": 1})
    mine, alone = errors(case, 2, KERNEL, mesh_of), errors(case, 1, XlaKernel(), mesh_of)
    assert all(mine[name] <= max(1.5 * alone[name], 2e-6) for name in mine), (mine, alone)


def test_auto_takes_it_where_a_call_gives_the_whole_result():
    assert isinstance(whole := get_kernel("auto", "gpu", whole=True), FirstThatCan)
    assert whole.kernels[0] == get_kernel("cudnn", "gpu")
    assert get_kernel("auto", "gpu", whole=False) == get_kernel("gpu", "gpu")


@pytest.mark.usefixtures("emulated")
def test_a_broken_token_reaches_no_earlier_one_and_rows_without_cotangent_keep_their_delta(problem, mesh_of):
    case, broken = problem(**HEAD, batch=1), problem(**HEAD, batch=1)
    cotangents = [x.copy() for x in case.inputs]
    cotangents[3][:, 7] = 0  # dlse is not
    object.__setattr__(case, "inputs", tuple(cotangents))
    alone = errors(case, 1, XlaKernel(), mesh_of)
    before = case.run(1, "contiguous", KERNEL, mesh=mesh_of(1, unused=1))
    assert all(error <= max(1.25 * alone[name], 2e-6) for name, error in case.errors(before).items())
    arrays = [x.copy() for x in cotangents]
    for x in arrays[:3]:
        x[:, 29] = np.nan
    object.__setattr__(broken, "inputs", tuple(arrays))
    after = broken.run(1, "contiguous", KERNEL, mesh=mesh_of(1, unused=1))
    for name in ("out", "lse", "dq"):
        finite = np.isfinite(after[name].astype(np.float32))
        assert finite[:, :29].all(), name
        assert not finite[:, 29:].any(), name


def test_the_stand_in_gives_delta():
    rng = np.random.default_rng(0)
    dout = jnp.asarray(rng.normal(size=(3, 5, 128)) * 10.0 ** rng.integers(-6, 6, (3, 5, 1)), jnp.bfloat16)
    dout = dout.at[0, 0].set(0).at[0, 1].set(0).at[0, 2].set(1)
    delta = jnp.asarray(rng.normal(size=(3, 5)), jnp.float32).at[0, 0].set(0)
    found = stand_in(delta, dout)
    assert found.dtype == dout.dtype
    got = np.asarray((found.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1))
    assert got[0, 0] == 0
    assert not np.isfinite(got[0, 1])
    delta = np.asarray(delta)
    np.testing.assert_allclose(np.delete(got.ravel(), 1), np.delete(delta.ravel(), 1), rtol=2e-5)


def call(mask=Mask(), order=Order.SLOTS, lead=Lead(), segments=None, **rule):  # noqa: B008 (frozen)
    tokens = Tokens(segments=segments)
    return Relation(mask, order, lead, tokens, tokens), ScoreRule(**{"scale": 0.1, **rule})


@pytest.mark.parametrize(
    ("length", "dim", "dtype", "relation_and_rule", "reason"),
    [
        (256, 128, "bfloat16", call(), None),
        (256, 64, "float16", call(order=Order.ALL), None),
        (256, 128, "float32", call(), "got float32"),
        (256, 256, "bfloat16", call(), "at most 128"),
        (250, 128, "bfloat16", call(), "multiples of 64"),
        (256, 128, "bfloat16", call(softcap=2.0), "softcap"),
        (256, 128, "bfloat16", call(alibi=True), "ALiBi"),
        (256, 128, "bfloat16", call(dropout=0.1), "dropout"),
        (256, 128, "bfloat16", call(segments=jnp.zeros((1, 256), jnp.int32)), "documents"),
        (256, 128, "bfloat16", call(order=Order.ANY), "positions that are data"),
        (256, 128, "bfloat16", call(Mask(window=9)), "windows"),
        (256, 128, "bfloat16", call(lead=Lead(4, 0, -3, 3)), "known beforehand"),
        (256, 128, "bfloat16", call(lead=Lead(4, -4, -4, -4)), "ahead of the keys"),
    ],
)
def test_what_it_refuses(length, dim, dtype, relation_and_rule, reason):
    q, kv = jnp.zeros((1, 1, 2, length, dim), dtype), jnp.zeros((1, 1, length, 2 * dim), dtype)
    refusal = CudnnKernel().refusal(q, kv, *relation_and_rule)
    assert refusal is None if reason is None else re.search(reason, refusal or ""), refusal


def lowered(kernel, **options):
    """The lap and its gradient of a ring of one, as XLA gets it."""
    mesh = jax.make_mesh((1,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)

    def loss(x):
        return ring_attention(x, x, x, mesh=mesh, kernel=kernel, **options).astype(jnp.float32).sum()

    with an_abstract_gpu():
        return jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("causal", [True, False])
def test_what_is_handed_to_xla(causal):
    text = lowered(KERNEL, mask=Mask(causal=causal), scale=0.3)
    assert text.count("custom_call @__cudnn$fmhaSoftmax(") == 1
    assert text.count("custom_call @__cudnn$fmhaSoftmaxBackward(") == 1
    assert text.count(f"mask_type\\22: \\22{'CAUSAL' if causal else 'NO_MASK'}\\22") == 2
    assert text.count("fmha_scale\\22: 0.3") == 2


def test_what_is_refused_is_an_error_and_auto_goes_on(monkeypatch, caplog):
    with pytest.raises(ValueError, match=r"kernel 'cudnn' cannot do what is asked for here.*windows.*'auto'"):
        lowered(KERNEL, mask=Mask(window=9))
    relation, rule = call()
    q, kv = jnp.zeros((1, 1, 2, 256, 64), "bfloat16"), jnp.zeros((1, 1, 256, 128), "bfloat16")
    monkeypatch.setattr(jax_private._cudnn(), "_dot_product_attention_bwd_impl", lambda query: None)
    jax_private.cudnn_problem.cache_clear()
    with caplog.at_level("DEBUG", "ringjax"):
        text = lowered(FirstThatCan((KERNEL, XlaKernel())))
    assert "__cudnn" not in text
    assert "attention kernel cudnn not for 256 queries: jax" in caplog.text
    assert "another cuDNN attention than is known here" in (KERNEL.refusal(q, kv, relation, rule) or "")
    monkeypatch.undo()
    jax_private.cudnn_problem.cache_clear()
    assert KERNEL.refusal(q, kv, relation, rule) is None


def an_abstract_gpu():
    """Since jax 0.12, lowering asks for the kind of GPU."""
    if jax.__version_info__ < (0, 12):
        return contextlib.nullcontext()
    gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=gpu))
