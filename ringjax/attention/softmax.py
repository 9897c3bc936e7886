"""Partial results of attention over disjoint sets of keys, in float32: identity and merge.

A partial result is a pair (out, lse) per query row: the softmax-weighted mean of the values seen so far, and the
log-sum-exp of their scores. Merging is associative and commutative, so keys may arrive in any order.
"""

from typing import Any, NamedTuple

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
    # The result does not depend on the shift, so no gradient flows through it.
    top = jax.lax.stop_gradient(finite_or_zero(jnp.maximum(a.lse, b.lse)))
    weight_a, weight_b = jnp.exp(a.lse - top), jnp.exp(b.lse - top)
    # A row without any key on either side has weights 0, 0 and must stay (0, -inf), with gradients of 0.
    empty = weight_a + weight_b == 0
    total = jnp.where(empty, 1.0, weight_a + weight_b)
    share_a, share_b = weight_a / total, weight_b / total
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))
    return Partial(a.out * share_a[..., None] + b.out * share_b[..., None], lse)


def merge_attention(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Attention over the keys of a and of b together, from (out, lse) over each, as `return_lse` gives them.

    lse = log(exp(lse_a) + exp(lse_b)), out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b. Differentiable; exact
    as long as no key is in both, and neither has sinks (add those at the end: out * sigmoid(lse - sink)).

    Args:
      a: out [..., H, Dv] and lse [..., H].
      b: likewise, for the same queries.

    Returns:
      out in the dtype of the first out, and lse in float32.

    Raises:
      ValueError: a or b are no such pairs, or not of the same queries.

    Example:
      >>> import jax.numpy as jnp
      >>> from ringjax.attention import merge_attention
      >>> one, two = (jnp.ones((1, 1)), jnp.zeros(1)), (jnp.full((1, 1), 3.0), jnp.zeros(1))
      >>> merge_attention(one, two)[0]
      Array([[2.]], dtype=float32)
    """
    for name, part in (("a", a), ("b", b)):
        _check_part(name, part)
    if a[0].shape != b[0].shape:
        raise ValueError(f"a and b must be of the same queries, got out {a[0].shape} and {b[0].shape}")
    parts = [Partial(out.astype(jnp.float32), lse.astype(jnp.float32)) for out, lse in (a, b)]
    merged = merge(*parts)
    return merged.out.astype(a[0].dtype), merged.lse


def _check_part(name: str, part: Any) -> None:
    if not isinstance(part, tuple | list) or len(part) != 2 or not all(hasattr(x, "dtype") for x in part):
        raise ValueError(f"{name} must be (out, lse), two arrays as return_lse=True gives them; got {type(part)}")
    out, lse = part
    floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in part)
    if not floats or out.ndim < 1 or out.shape[:-1] != lse.shape:
        raise ValueError(
            f"{name} must be (out [..., H, Dv], lse [..., H]), floating-point numbers; got out {out.dtype} "
            f"{out.shape} and lse {lse.dtype} {lse.shape}"
        )


def finite_or_zero(lse: jax.Array) -> jax.Array:
    """lse with -inf replaced by 0, so that a row without keys subtracts nothing instead of giving NaN."""
    return jnp.where(jnp.isneginf(lse), 0.0, lse)


@jax.custom_jvp
def sink_share(excess: jax.Array) -> jax.Array:
    """sigmoid(lse - sink), the weight that a sink leaves to the keys.

    With a derivative that stays exact where nearly all is left to them: jax's own subtracts the share from 1.
    """
    return jax.nn.sigmoid(excess)


@sink_share.defjvp
def _sink_share_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (excess,), (tangent,) = primals, tangents
    share = jax.nn.sigmoid(excess)
    return share, tangent * share * jax.nn.sigmoid(-excess)


def filled(like: jax.Array, shape: tuple[int, ...], value: float = 0.0) -> jax.Array:
    """A float32 array of one value that varies over the same manual mesh axes as `like`.

    Inside `shard_map` the accumulators of a loop and the branches of a condition must have the type of what is put
    into them, and a plain constant is the same on all devices. The select below always yields 0 and the compiler
    removes it; what stays is its type.
    """
    corner = like[(0,) * like.ndim]
    return jnp.full(shape, value, jnp.float32) + jnp.where(corner == corner, 0.0, 0.0)
