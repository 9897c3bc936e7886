"""Dense attention, the oracle: every score of every pair, in the precision of its inputs."""

from typing import Any

import jax
import jax.numpy as jnp

from ringjax.attention.mask import AnyArray, Mask, Tokens, visible
from ringjax.attention.scores import head_noise, keep


def reference_attention(
    q_BSHD: AnyArray,
    k_BSKD: AnyArray,
    v_BSKD: AnyArray,
    *,
    mask: Mask = Mask(),  # noqa: B008 (frozen)
    segment_ids: AnyArray | None = None,
    positions: AnyArray | None = None,
    kv_segment_ids: AnyArray | None = None,
    kv_positions: AnyArray | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: AnyArray | None = None,
    alibi_slopes: Any = None,
    dropout_rate: float = 0.0,
    dropout_seed: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Attention as its formula says: lse = log sum_j exp(s_j), out = sum_j exp(s_j - lse) v_j.

    Memory is O(S^2). Computes in the dtype of q (give float64 under `jax.enable_x64` for an oracle), in natural
    order unless `positions` say otherwise. Differentiable by jax's own rules. Arguments as in `ring_attention`.

    Returns:
      out [B, S, H, D] and lse [B, S, H]; a row that sees no key has out 0 and lse -inf.
    """
    batch, q_len, num_heads, dim = q_BSHD.shape
    k_len, dtype = k_BSKD.shape[1], q_BSHD.dtype
    q_places = jnp.arange(q_len)[None] if positions is None else jnp.asarray(positions)
    k_places = kv_positions if kv_positions is not None else positions
    k_places = jnp.arange(k_len)[None] if k_places is None else jnp.asarray(k_places)
    q_segments, k_segments = (
        None if x is None else jnp.asarray(x)
        for x in (segment_ids, segment_ids if kv_segment_ids is None else kv_segment_ids)
    )
    q_side = jax.tree.map(lambda x: x[:, None, :, None], Tokens(q_places, q_segments))
    k_side = jax.tree.map(lambda x: x[:, None, None, :], Tokens(k_places, k_segments))

    seen = visible(mask, q_side, k_side)
    seen = jnp.ones((1, 1, q_len, k_len), bool) if seen is None else seen
    bias, weight = jnp.zeros((1, 1, 1, 1), dtype), jnp.ones((1, 1, 1, 1), dtype)
    if alibi_slopes is not None:
        distance = jnp.abs(q_side.positions - k_side.positions)
        bias = -jnp.asarray(alibi_slopes, dtype)[:, None, None] * distance
    if dropout_rate:
        noise = head_noise(dropout_seed, jnp.arange(batch), jnp.arange(num_heads))[:, :, None, None]
        kept = keep(noise, q_side.positions, k_side.positions, dropout_rate)
        weight = jnp.where(kept, jnp.asarray(1 / (1 - dropout_rate), dtype), 0)
    full = (batch, num_heads, q_len, k_len)
    return _dense(
        q_BSHD,
        k_BSKD,
        v_BSKD,
        jnp.broadcast_to(seen, full),
        jnp.broadcast_to(bias, full),
        jnp.broadcast_to(weight, full),
        jnp.asarray(dim**-0.5 if scale is None else scale, dtype),
        jnp.asarray(jnp.inf if softcap is None else softcap, dtype),
        jnp.full(num_heads, -jnp.inf, dtype) if sinks is None else sinks,
    )


@jax.jit
def _dense(q_BSHD, k_BSKD, v_BSKD, seen, bias, weight, scale, softcap, sinks):
    """The formula. Masks, bias and dropout's weights are arrays, so that one program serves all of them."""
    batch, q_len, num_heads, dim = q_BSHD.shape
    k_len, kv_heads = k_BSKD.shape[1:3]
    q_BSKGD = q_BSHD.reshape(batch, q_len, kv_heads, -1, dim)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", q_BSKGD, k_BSKD, precision="highest")
    scores = scores.reshape(batch, num_heads, q_len, k_len) * scale
    bounded = jnp.isfinite(softcap)
    cap = jnp.where(bounded, softcap, 1)
    scores = jnp.where(bounded, cap * jnp.tanh(scores / cap), scores) + bias

    top = jnp.max(scores, axis=-1, keepdims=True, where=seen, initial=-jnp.inf)
    top = jax.lax.stop_gradient(jnp.where(jnp.isneginf(top), 0.0, top))
    p = jnp.where(seen, jnp.exp(jnp.where(seen, scores, top) - top), 0.0)
    total = p.sum(-1, keepdims=True)
    empty = total == 0
    safe = jnp.where(empty, 1.0, total)
    lse = jnp.log(safe) + top
    share = jax.nn.sigmoid(lse - sinks[:, None, None])  # 1 without sinks
    p = p / safe * weight * share
    out = jnp.einsum("bkgqs,bskd->bqkgd", p.reshape(batch, kv_heads, -1, q_len, k_len), v_BSKD, precision="highest")
    lse_BHS = jnp.where(empty, -jnp.inf, lse)[..., 0]
    return out.reshape(batch, q_len, num_heads, -1), lse_BHS.swapaxes(1, 2)
