"""The loops of the operator."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


def loop(step: Callable[[T, Any], T], state: T, xs: Any) -> T:
    """`jax.lax.scan(lambda state, x: (step(state, x), None), state, xs)[0]`, which jax never takes apart.

    Where a caller differentiates a `lax.scan` or a `jax.checkpoint` around attention, jax looks for what can be
    computed beforehand: it would cut a scan of ours in two, and keep the masks and weights of every pair of tiles
    for the second half, which is memory in proportion to S^2. A `while_loop` stays whole. Nothing is differentiated
    through it: the operator's gradient is its own.

    Args:
      step: `(state, x) -> state`, of the same types.
      state: what goes round.
      xs: pytree of arrays, one slice of each for each step.
    """
    count = jax.tree.leaves(xs)[0].shape[0]

    def body(carry: tuple[jax.Array, T]) -> tuple[jax.Array, T]:
        i, state = carry
        x = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(jnp.asarray(x), i, keepdims=False), xs)
        return i + 1, step(state, x)

    return jax.lax.while_loop(lambda carry: carry[0] < count, body, (_first(count), state))[1]


def _first(count: int) -> jax.Array:
    """0, where a loop of so many trips begins.

    XLA takes a loop of one trip apart. On CPUs its steps then mingle with those around it, which keeps a block of the
    ring alive for longer, so there it must not see where such a loop begins. Elsewhere not to know costs time.
    """
    zero = jnp.int32(0)
    if count != 1:
        return zero
    return jax.lax.platform_dependent(cpu=lambda: jax.lax.optimization_barrier(zero), default=lambda: zero)
