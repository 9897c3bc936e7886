"""Cross-entropy over a sharded sequence, without ever holding the logits of all tokens."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from einops import rearrange

from ringjax.models.decoder import Decoder
from ringjax.parallel import constrain, device_count

# Letters: P pieces of the batch, R pieces of the sequence (one of each on every device), Q chunks, C tokens in one.


def token_loss_sum(
    decoder: Decoder, hidden: jax.Array, targets: jax.Array, weights: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """Sum of weighted token losses, and sum of weights, over all tokens of all devices.

        loss = sum_t w_t (log sum_v exp(logit_tv) - logit_{t, target_t})

    Each device runs over its own tokens, `chunk` at a time, and keeps one log-sum-exp a token; the backward pass
    computes the chunk's logits again. Neither tokens nor logits move: with the vocabulary sharded over tensor,
    one maximum and two sums a token do. The mean is the caller's division, after summing over whatever else
    there is to sum over.

    Args:
      decoder: whose output head is used.
      hidden: [B, S, M], from `decoder.hidden`.
      targets: [B, S] int, the token to predict at each place. A negative one, as the -100 of other frameworks, is
        none: that place counts for nothing.
      weights: [B, S] float, what each token counts for.
      chunk: tokens of each device whose logits exist at one time. The last chunk may be padded.

    Returns:
      Two float32 scalars.
    """
    pieces_P, pieces_R = _pieces()
    tokens = hidden.shape[0] * hidden.shape[1] // (pieces_P * pieces_R)
    count = math.ceil(tokens / chunk)
    size = math.ceil(tokens / count)

    def cut(x: jax.Array, *dims: None) -> jax.Array:
        """[B, S, ...] -> [Q, P, R, C, ...], with zeros for the missing tokens of the last chunk."""
        x = rearrange(x, "(P b) (R L) ... -> P R (b L) ...", P=pieces_P, R=pieces_R)
        x = jnp.pad(x, [(0, 0), (0, 0), (0, count * size - tokens)] + [(0, 0)] * len(dims))
        return constrain(rearrange(x, "P R (Q C) ... -> Q P R C ...", Q=count), None, "rows", "seq", None, *dims)

    weights = jnp.where(targets < 0, 0.0, weights.astype(jnp.float32))
    loss = _loss_sum(cut(hidden, None), decoder.head_weight(), cut(targets), cut(weights))
    return loss, weights.sum()


def _pieces() -> tuple[int, int]:
    """Devices over which the batch and the sequence are spread: P, R."""
    return device_count("rows"), device_count("seq")


@jax.custom_vjp
def _loss_sum(hidden_QPRCM: jax.Array, head_MV: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """Sum of weighted losses; targets and weights are [Q, P, R, C]."""
    return _forward(hidden_QPRCM, head_MV, targets, weights)[0]


def _forward(hidden_QPRCM, head_MV, targets, weights):
    """The sum and what the backward pass needs: the inputs and one log-sum-exp a token."""

    def body(total_PR, chunk):
        hidden_PRCM, targets_PRC, weights_PRC = chunk
        logits = _logits(hidden_PRCM, head_MV)
        lse_PRC = jax.nn.logsumexp(logits, axis=-1)
        label_PRC = jnp.sum(jnp.where(_is_target(logits, targets_PRC), logits, 0.0), axis=-1)
        losses_PRC = lse_PRC - label_PRC
        return total_PR + jnp.sum(weights_PRC * losses_PRC, axis=-1), (lse_PRC, losses_PRC)

    start = constrain(jnp.zeros(hidden_QPRCM.shape[1:3], jnp.float32), "rows", "seq")
    total_PR, (lse, losses) = jax.lax.scan(body, start, (hidden_QPRCM, targets, weights))
    return total_PR.sum(), (hidden_QPRCM, head_MV, targets, weights, lse, losses)


def _backward(residuals, grad):
    """dlogits = (softmax - one-hot) weight, one chunk at a time.

    The head's gradient adds up in float32 on each device by itself, in its own slice [P, R] of the carry, and is
    summed over the devices once, after the last chunk.
    """
    hidden_QPRCM, head_MV, targets, weights, lse, losses = residuals

    def body(dhead_PRMV, chunk):
        hidden_PRCM, targets_PRC, weights_PRC, lse_PRC = chunk
        logits = _logits(hidden_PRCM, head_MV)
        dlogits = jnp.exp(logits - lse_PRC[..., None]) - _is_target(logits, targets_PRC)
        dlogits = (dlogits * (grad * weights_PRC)[..., None]).astype(hidden_PRCM.dtype)
        dhidden_PRCM = jnp.einsum("PRCV,MV->PRCM", dlogits, head_MV)
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        dhead_PRMV = dhead_PRMV + product("PRCM,PRCV->PRMV", hidden_PRCM, dlogits)
        dims = ("rows", "seq", "embed", "vocab")
        return constrain(dhead_PRMV, *dims), constrain(dhidden_PRCM, "rows", "seq", None, "embed")

    start = jnp.zeros((*hidden_QPRCM.shape[1:3], *head_MV.shape), jnp.float32)
    start = constrain(start, "rows", "seq", "embed", "vocab")
    dhead_PRMV, dhidden = jax.lax.scan(body, start, (hidden_QPRCM, targets, weights, lse))
    return dhidden, dhead_PRMV.sum((0, 1)).astype(head_MV.dtype), None, grad * losses


_loss_sum.defvjp(_forward, _backward)


def _logits(hidden_PRCM: jax.Array, head_MV: jax.Array) -> jax.Array:
    """[P, R, C, V] float32, the vocabulary sharded over tensor."""
    logits = jnp.einsum("PRCM,MV->PRCV", hidden_PRCM, head_MV, preferred_element_type=jnp.float32)
    return constrain(logits, "rows", "seq", None, "vocab")


def _is_target(logits: jax.Array, targets_PRC: jax.Array) -> jax.Array:
    """[P, R, C, V] bool. Compared, not indexed: each device looks at its own part of the vocabulary."""
    return jax.lax.broadcasted_iota(targets_PRC.dtype, logits.shape, 3) == targets_PRC[..., None]
