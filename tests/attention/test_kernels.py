"""Every kernel alone, one block against one block, for tiles that fit and tiles that do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.attention import Mask
from ringjax.attention.kernels import (
    CpuKernel,
    CudnnKernel,
    GpuKernel,
    Gradients,
    Lead,
    Order,
    Relation,
    Slots,
    SplashKernel,
    TpuKernel,
    XlaKernel,
    all_slots,
    get_kernel,
)
from ringjax.attention.mask import Tokens
from ringjax.attention.scores import Heads, ScoreRule
from ringjax.attention.softmax import Partial

BATCH, KV_HEADS, GROUP, DIM = 2, 2, 2, 4
KERNELS = [
    XlaKernel(),
    XlaKernel(q_tile=8, k_tile=4),
    XlaKernel(q_tile=10, k_tile=7),
    XlaKernel(q_tile=2, k_tile=3),
    CpuKernel(),
    CpuKernel(by_head=True),
    CpuKernel(flags=()),
    TpuKernel(q_tile=5, k_tile=7, rows=5, interpret=True),
    GpuKernel(q_tile=4, k_tile=8, interpret=True),
]


def dense(q, k, v, seen, scale):
    """Attention as its formula says, in float64, with `seen` [B, Lq, Lk]."""
    scores = np.einsum("bkgqd,bksd->bkgqs", q, k) * scale
    scores = np.where(seen[:, None, None], scores, -np.inf)
    top = np.maximum(scores.max(-1, keepdims=True), -1e30)
    weights = np.exp(scores - top)
    total = weights.sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top[..., 0]
    p = weights / np.where(total == 0, 1, total)[..., None]
    return np.einsum("bkgqs,bksd->bkgqd", p, v), lse, p


def dense_backward(q, k, v, p, delta, dout, scale):
    """dq, dk, dv from probabilities."""
    dp = np.einsum("bkgqd,bksd->bkgqs", dout, v)
    ds = p * (dp - delta[..., None]) * scale
    return (
        np.einsum("bkgqs,bksd->bkgqd", ds, k),
        np.einsum("bkgqs,bkgqd->bksd", ds, q),
        np.einsum("bkgqs,bkgqd->bksd", p, dout),
    )


def relation_and_sight(order, lead, q_len, k_len, packed, mask=Mask()):  # noqa: B008 (frozen)
    """A relation, and by another way what it lets be seen."""
    rng = np.random.default_rng(3)
    q_index, k_index = np.arange(q_len)[:, None], np.arange(k_len)[None]
    q_positions, k_positions = (rng.integers(0, 20, (BATCH, n)).astype(np.int32) for n in (q_len, k_len))
    ahead = {
        Order.ALL: np.zeros((1, q_len, k_len), int),
        Order.SLOTS: (lead.stride * (q_index - k_index) + lead.by)[None],
        Order.ANY: q_positions[:, :, None] - k_positions[:, None],
    }[order]
    far = 10**6 if mask.window is None else mask.window
    seen = (ahead < far) & (ahead >= 0 if mask.causal else ahead > -far)
    seen = np.broadcast_to(seen, (BATCH, q_len, k_len))
    given = order is Order.ANY
    q_tokens = Tokens(jnp.asarray(q_positions) if given else None)
    k_tokens = Tokens(jnp.asarray(k_positions) if given else None)
    if packed:
        q_segments, k_segments = (
            np.sort(rng.integers(-1, 3, (BATCH, n)), 1).astype(np.int32) for n in (q_len, k_len)
        )
        same = q_segments[:, :, None] == k_segments[:, None]
        seen = seen & same & (k_segments[:, None] >= 0)
        q_tokens = q_tokens._replace(segments=jnp.asarray(q_segments))
        k_tokens = k_tokens._replace(segments=jnp.asarray(k_segments))
    return Relation(mask, order, lead, q_tokens, k_tokens), seen


def some_slots(size, padding):
    """Slots of a block with `padding` more on either side, of which nothing may be touched."""
    return Slots(jnp.int32(padding), size, padding) if padding else all_slots(size)


def padded(x, padding, dim):
    """What no call is about must not matter: it is made of a number that no sum would survive."""
    pad = [(0, 0)] * x.ndim
    pad[dim] = (padding, padding)
    return jnp.asarray(np.pad(x, pad, constant_values=1e30), jnp.float32)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize(
    ("order", "lead", "q_len", "k_len", "packed", "mask", "padding"),
    [
        (Order.ALL, Lead(), 16, 12, False, Mask(), (4, 4)),
        (Order.ALL, Lead(), 13, 17, True, Mask(), (0, 0)),
        (Order.SLOTS, Lead(), 16, 16, True, Mask(), (16, 0)),
        (Order.SLOTS, Lead(by=-1, low=-1), 13, 13, False, Mask(), (0, 13)),
        (Order.SLOTS, Lead(3, 2, -2, 2), 16, 16, False, Mask(window=14), (0, 0)),
        (Order.SLOTS, Lead(1, 9, 9, 9), 16, 13, False, Mask(causal=False, window=8), (7, 7)),
        (Order.ANY, Lead(), 17, 11, True, Mask(window=9), (3, 11)),
        (Order.ANY, Lead(), 20, 14, True, Mask(window=9), (20, 14)),
    ],
)
def test_equals_the_formula(kernel, order, lead, q_len, k_len, packed, mask, padding):
    check_formula(kernel, order, lead, q_len, k_len, packed, mask, padding)


@pytest.mark.parametrize(
    ("order", "lead", "q_len", "k_len", "packed", "mask", "padding"),
    [
        (Order.ALL, Lead(), 128, 256, False, Mask(), (128, 128)),
        (Order.SLOTS, Lead(), 256, 256, True, Mask(), (0, 0)),
        (Order.SLOTS, Lead(by=-1, low=-1, high=-1), 256, 256, False, Mask(window=100), (256, 0)),
    ],
)
def test_splash_equals_the_formula(order, lead, q_len, k_len, packed, mask, padding):
    """Its tiles are 128 slots at least, and its scale is a power of two."""
    kernel = SplashKernel(tile=128, exact=XlaKernel(), interpret=True)
    check_formula(kernel, order, lead, q_len, k_len, packed, mask, padding, dim=64, scale=0.125)


def check_formula(kernel, order, lead, q_len, k_len, packed, mask, padding, dim=DIM, scale=0.3):
    rng = np.random.default_rng(0)
    q, dout = (rng.normal(size=(BATCH, KV_HEADS, GROUP, q_len, dim)) for _ in range(2))
    k, v = (rng.normal(size=(BATCH, KV_HEADS, k_len, dim)) for _ in range(2))
    delta = rng.normal(size=(BATCH, KV_HEADS, GROUP, q_len))
    relation, seen = relation_and_sight(order, lead, q_len, k_len, packed, mask)
    out, lse, p = dense(q, k, v, seen, scale)
    # Some rows have seen other keys before, and some have not.
    before_out, before_lse = rng.normal(size=out.shape), rng.normal(size=lse.shape)
    before_lse[..., ::3], before_out[..., ::3, :] = -np.inf, 0
    merged_lse = np.logaddexp(lse, before_lse)
    shift = np.where(np.isneginf(merged_lse), 0, merged_lse)
    merged = sum(x * np.exp(y - shift)[..., None] for x, y in ((out, lse), (before_out, before_lse)))
    # They have raised the lse: the backward pass must use the one it is given.
    dq, dk, dv = dense_backward(q, k, v, p * np.exp(lse - shift)[..., None], delta, dout, scale)
    dkv = np.concatenate([dk, dv], -1)
    before_dq, before_dkv = rng.normal(size=dq.shape), rng.normal(size=dkv.shape)

    slots = [some_slots(q_len, padding[0]), some_slots(k_len, padding[1])]
    rest = relation, ScoreRule(scale), Heads()
    q, *of_q = (padded(x, padding[0], 3) for x in (q, merged_lse, delta, dout))
    kv = padded(np.concatenate([k, v], -1), padding[1], 2)
    before = Partial(padded(before_out, padding[0], 3), padded(before_lse, padding[0], 3))
    sums = Gradients(padded(before_dq, padding[0], 3), padded(before_dkv, padding[1], 2))
    part = jax.jit(lambda q, kv, before: kernel.forward(q, kv, *rest, before, *slots))(q, kv, before)
    got = jax.jit(lambda q, kv, of_q, sums: kernel.backward(q, kv, *rest, *of_q, sums, *slots))(q, kv, of_q, sums)

    np.testing.assert_allclose(part.out, padded(merged, padding[0], 3), atol=2e-6)
    np.testing.assert_allclose(part.lse, padded(merged_lse, padding[0], 3), rtol=2e-6, atol=2e-6)
    assert got.dq.dtype == got.dkv.dtype == jnp.float32
    np.testing.assert_allclose(got.dq, padded(before_dq + dq, padding[0], 3), atol=1e-5)
    np.testing.assert_allclose(got.dkv, padded(before_dkv + dkv, padding[1], 2), atol=1e-5)


SMALL_TILES = [
    XlaKernel(q_tile=4, k_tile=4),
    CpuKernel(),
    TpuKernel(q_tile=4, k_tile=4, interpret=True),
    GpuKernel(q_tile=4, k_tile=4, interpret=True),
]


@pytest.mark.parametrize("kernel", SMALL_TILES, ids=str)
def test_broken_values_stay_with_those_who_see_them(kernel):
    length = 16
    segments = jnp.repeat(jnp.arange(4), 4)[None]
    tokens = Tokens(segments=segments)
    relation = Relation(Mask(), Order.SLOTS, Lead(), tokens, tokens)
    x = np.ones((1, 1, 1, length, DIM), np.float32)
    v = np.ones((1, 1, length, DIM), np.float32)
    v[:, :, 4:8] = np.nan
    before = Partial(jnp.zeros(x.shape), jnp.full(x.shape[:-1], -jnp.inf))
    kv = jnp.concatenate([x[:, :, 0], v], -1)
    slots = all_slots(length), all_slots(length)
    out = kernel.forward(jnp.asarray(x), kv, relation, ScoreRule(1.0), Heads(), before, *slots).out
    assert np.isnan(out[..., 4:8, :]).all()
    assert np.isfinite(np.delete(out, np.s_[4:8], axis=3)).all()


def test_kernels_by_name(caplog):
    with caplog.at_level("DEBUG", "ringjax"):
        assert get_kernel("xla", "tpu") == get_kernel("auto", "unheard of") == XlaKernel()
        assert get_kernel("auto", "cpu") == get_kernel("cpu", "cpu") == CpuKernel(by_head=True)
        assert get_kernel("auto", "cpu", whole=True) == get_kernel("cpu", "cpu", whole=True) == CpuKernel()
        assert get_kernel("auto", "tpu") == get_kernel("tpu", "tpu") == TpuKernel()
        assert get_kernel("auto", "gpu") == get_kernel("gpu", "gpu") == GpuKernel()
    assert "attention kernel xla, since the devices are UNHEARD OFs: they have none of their own" in caplog.text
    assert "attention kernel cpu, since the devices are CPUs: it is fused for them" in caplog.text
    assert "attention kernel tpu, since the devices are TPUs: it is fused for them" in caplog.text
    assert get_kernel("splash", "tpu") == SplashKernel()
    assert get_kernel("cudnn", "gpu") == CudnnKernel()
    mine = XlaKernel(q_tile=64)
    assert get_kernel(mine, "cpu") is mine
    with pytest.raises(ValueError, match="unknown kernel 'magic'; the kernels are auto, xla, cpu"):
        get_kernel("magic", "cpu")
    for name, platform in (("tpu", "TPU"), ("splash", "TPU"), ("gpu", "GPU"), ("cudnn", "GPU")):
        with pytest.raises(
            ValueError, match=f"'{name}' runs on {platform}s, and the devices here are CPUs; use 'auto'"
        ):
            get_kernel(name, "cpu")
