"""Every kernel alone, one block against one block, for tiles that fit and tiles that do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.attention import Mask
from ringjax.attention.kernels import GpuKernel, Lead, Order, Relation, TpuKernel, XlaKernel, get_kernel
from ringjax.attention.mask import Tokens
from ringjax.attention.scores import Heads, ScoreRule
from ringjax.attention.softmax import Partial

BATCH, KV_HEADS, GROUP, DIM = 2, 2, 2, 4
KERNELS = [
    XlaKernel(),
    XlaKernel(q_tile=8, k_tile=4),
    XlaKernel(q_tile=10, k_tile=7),
    XlaKernel(q_tile=2, k_tile=3),
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


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize(
    ("order", "lead", "q_len", "k_len", "packed", "mask"),
    [
        (Order.ALL, Lead(), 16, 12, False, Mask()),
        (Order.ALL, Lead(), 13, 17, True, Mask()),
        (Order.SLOTS, Lead(), 16, 16, True, Mask()),
        (Order.SLOTS, Lead(by=-1, low=-1), 13, 13, False, Mask()),
        (Order.SLOTS, Lead(3, 2, -2, 2), 16, 16, False, Mask(window=14)),
        (Order.SLOTS, Lead(1, 9, 9, 9), 16, 13, False, Mask(causal=False, window=8)),
        (Order.ANY, Lead(), 17, 11, True, Mask(window=9)),
    ],
)
def test_equals_the_formula(kernel, order, lead, q_len, k_len, packed, mask):
    rng = np.random.default_rng(0)
    q, dout = (rng.normal(size=(BATCH, KV_HEADS, GROUP, q_len, DIM)) for _ in range(2))
    k, v = (rng.normal(size=(BATCH, KV_HEADS, k_len, DIM)) for _ in range(2))
    delta = rng.normal(size=(BATCH, KV_HEADS, GROUP, q_len))
    relation, seen = relation_and_sight(order, lead, q_len, k_len, packed, mask)
    out, lse, p = dense(q, k, v, seen, 0.3)
    # Some rows have seen other keys before, and some have not.
    before_out, before_lse = rng.normal(size=out.shape), rng.normal(size=lse.shape)
    before_lse[..., ::3], before_out[..., ::3, :] = -np.inf, 0
    merged_lse = np.logaddexp(lse, before_lse)
    shift = np.where(np.isneginf(merged_lse), 0, merged_lse)
    merged = sum(x * np.exp(y - shift)[..., None] for x, y in ((out, lse), (before_out, before_lse)))
    # They have raised the lse: the backward pass must use the one it is given.
    gradients = dense_backward(q, k, v, p * np.exp(lse - shift)[..., None], delta, dout, 0.3)

    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    before = Partial(jnp.asarray(before_out, jnp.float32), jnp.asarray(before_lse, jnp.float32))
    part = jax.jit(lambda *x: kernel.forward(*x, relation, ScoreRule(0.3), Heads(), before))(*arrays)
    rows = [jnp.asarray(x, jnp.float32) for x in (merged_lse, delta, dout)]
    got = jax.jit(lambda *x: kernel.backward(*x[:3], relation, ScoreRule(0.3), Heads(), *x[3:]))(*arrays, *rows)

    np.testing.assert_allclose(part.out, merged, atol=2e-6)
    np.testing.assert_allclose(part.lse, merged_lse, rtol=2e-6, atol=2e-6)
    for mine, want in zip(got, gradients, strict=True):
        assert mine.dtype == jnp.float32
        np.testing.assert_allclose(mine, want, atol=1e-5)


SMALL_TILES = [
    XlaKernel(q_tile=4, k_tile=4),
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
    out = kernel.forward(
        jnp.asarray(x), jnp.asarray(x[:, :, 0]), jnp.asarray(v), relation, ScoreRule(1.0), Heads(), before
    ).out
    assert np.isnan(out[..., 4:8, :]).all()
    assert np.isfinite(np.delete(out, np.s_[4:8], axis=3)).all()


def test_kernels_by_name(caplog):
    with caplog.at_level("DEBUG", "ringjax"):
        assert get_kernel("auto", "cpu") == get_kernel("xla", "tpu") == XlaKernel()
        assert get_kernel("auto", "tpu") == get_kernel("tpu", "tpu") == TpuKernel()
    assert "attention kernel xla, since the devices are CPUs: they have none of their own" in caplog.text
    assert "attention kernel tpu, since the devices are TPUs: it is fused for them" in caplog.text
    mine = XlaKernel(q_tile=64)
    assert get_kernel(mine, "cpu") is mine
    with pytest.raises(ValueError, match="unknown kernel 'magic'; the kernels are auto, xla"):
        get_kernel("magic", "cpu")
    with pytest.raises(ValueError, match="kernel 'tpu' runs on TPUs, and the devices here are CPUs; use 'auto'"):
        get_kernel("tpu", "cpu")
