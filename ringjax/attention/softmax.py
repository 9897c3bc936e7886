"""Partial results of attention over disjoint sets of keys, in float32: identity and merge.

A partial result is a pair (out, lse) per query row: the softmax-weighted mean of the values seen so far, and the
log-sum-exp of their scores. Merging is associative and commutative, so keys may arrive in any order.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Partial(NamedTuple):
    """Attention over some of the keys. Rows that saw none have out 0 and lse -inf."""

    out: jax.Array  # [..., L, D] float32
    lse: jax.Array  # [..., L] float32, natural log


def merge(a: Partial, b: Partial) -> Partial:
    """Combine two partial results over disjoint keys.

    lse = log(exp(lse_a) + exp(lse_b)), out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
    (the online softmax, Milakov and Gimelshein, arXiv:1805.02867), shifted by the larger lse so that nothing
    overflows.
    """
    top = finite_or_zero(jnp.maximum(a.lse, b.lse))
    weight_a, weight_b = jnp.exp(a.lse - top), jnp.exp(b.lse - top)
    total = weight_a + weight_b
    # A row without any key on either side has weights 0, 0 and must stay (0, -inf).
    share_b = weight_b / jnp.where(total == 0, 1.0, total)
    share_a = weight_a / jnp.where(total == 0, 1.0, total)
    return Partial(a.out * share_a[..., None] + b.out * share_b[..., None], top + jnp.log(total))


def finite_or_zero(lse: jax.Array) -> jax.Array:
    """lse with -inf replaced by 0, so that a row without keys subtracts nothing instead of giving NaN."""
    return jnp.where(jnp.isneginf(lse), 0.0, lse)


def filled(like: jax.Array, shape: tuple[int, ...], value: float = 0.0) -> jax.Array:
    """A float32 array of one value that varies over the same manual mesh axes as `like`.

    Inside `shard_map` the accumulators of a loop and the branches of a condition must have the type of what is put
    into them, and a plain constant is the same on all devices. The select below always yields 0 and the compiler
    removes it; what stays is its type.
    """
    corner = like[(0,) * like.ndim]
    return jnp.full(shape, value, jnp.float32) + jnp.where(corner == corner, 0.0, 0.0)
