"""Dense attention, the oracle: every score of every pair, in the precision of its inputs."""

import jax
import jax.numpy as jnp

from ringjax.attention.mask import Mask, Tokens, visible


def reference_attention(
    q_BSHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    *,
    mask: Mask = Mask(),  # noqa: B008 (frozen)
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention as its formula says: lse = log sum_j exp(s_j), out = sum_j exp(s_j - lse) v_j.

    Memory is O(S^2). Computes in the dtype of q (give float64 under `jax.enable_x64` for an oracle), in natural
    order unless `positions` say otherwise. Differentiable by jax's own rules. Arguments as in `ring_attention`.

    Returns:
      out [B, S, H, D] and lse [B, S, H]; a row that sees no key has out 0 and lse -inf.
    """
    batch, seq, heads, dim = q_BSHD.shape
    kv_heads = k_BSKD.shape[2]
    q_BSKGD = q_BSHD.reshape(batch, seq, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("bqkgd,bskd->bqkgs", q_BSKGD, k_BSKD, precision="highest")
    scores = scores * (dim**-0.5 if scale is None else scale)
    if positions is None:
        positions = jnp.arange(seq)[None]
    tokens = Tokens(positions, segment_ids)
    seen = visible(mask, tokens, tokens)
    seen = jnp.ones((1, seq, seq), bool) if seen is None else seen
    seen = seen[:, :, None, None, :]
    top = jnp.max(scores, axis=-1, keepdims=True, where=seen, initial=-jnp.inf)
    top = jax.lax.stop_gradient(jnp.where(jnp.isneginf(top), 0.0, top))
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores, top) - top), 0.0)
    total = weights.sum(-1, keepdims=True)
    empty = total == 0
    safe = jnp.where(empty, 1.0, total)
    out = jnp.einsum("bqkgs,bskd->bqkgd", weights / safe, v_BSKD, precision="highest")
    lse = jnp.where(empty, -jnp.inf, jnp.log(safe) + top)
    return out.reshape(batch, seq, heads, -1), lse.reshape(batch, seq, heads)
