"""What kernels of libraries leave out of the contract of block kernels, put around them."""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import and_
from typing import TypeVar

import jax
import jax.numpy as jnp

from ringjax.attention.kernels.base import BlockKernel, KernelError, Relation
from ringjax.attention.scores import ScoreRule

T = TypeVar("T")

# Products of two numbers below it, summed over a head, are far from the end of float32.
LARGEST = 2.0**48


def guarded(quick: T, inputs: Sequence[jax.Array], again: Callable[[], T]) -> T:
    """`quick`, or `again()` where the inputs hold numbers that a weight of 0 does not silence.

    Libraries multiply what is hidden by 0, and 0 * NaN is NaN: a token that is not finite, or whose products are not,
    would reach the rows of its tile that may not see it.

    Args:
      quick: what the library gives.
      inputs: all that it multiplies.
      again: the same by a kernel that keeps the contract.
    """
    fine = reduce(and_, [(jnp.abs(x) < LARGEST).all() for x in inputs])
    # A loop of at most one round, and no condition: under vmap a condition becomes a choice between two results that
    # are both computed, and a loop goes on only while one of the cases needs it.
    _, result = jax.lax.while_loop(
        lambda state: state[0], lambda state: (jnp.zeros_like(state[0]), again()), (~fine, quick)
    )
    return result


def checked_by_jax(*arrays: jax.Array) -> str | None:
    """Why a library's kernel cannot run where jax keeps track of what varies between devices, None elsewhere."""
    if any(jax.typeof(x).manual_axis_type.varying for x in arrays):
        return "inside a jax.shard_map with check_vma it does not say which of its results vary between devices"
    return None


def insist(kernel: BlockKernel, q: jax.Array, kv: jax.Array, relation: Relation, rule: ScoreRule) -> None:
    """Refuse what the kernel cannot do.

    Raises:
      KernelError: there is a reason.
    """
    reason = kernel.refusal(q, kv, relation, rule)
    if reason is not None:
        raise KernelError(
            f"kernel {kernel.name!r} cannot do what is asked for here: {reason}; use 'auto', which takes the best "
            "kernel that can"
        )
