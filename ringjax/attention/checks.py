"""What the operator refuses, and why. Everything here happens before any work starts."""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ringjax.attention.mask import Mask
from ringjax.attention.program import Axes

STANDARD_BATCH_AXES = ("data", "fsdp")
STANDARD_HEAD_AXIS = "tensor"
DTYPES = ("float32", "bfloat16", "float16")


def check_options(mask: Mask, scale: Any, softcap: Any, strategy: Any, return_lse: Any) -> None:
    """Options that are no arrays."""
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a Mask, such as Mask(causal=True), got {_described(mask)}")
    if scale is not None and not _is_number(scale):
        raise ValueError(f"scale must be a finite number, known when the program is built (static); got {scale!r}")
    if softcap is not None and not (_is_number(softcap) and np.float32(softcap) > 0):
        raise ValueError(f"softcap must be None or a finite number above 0, static; got {softcap!r}")
    if not isinstance(return_lse, bool):
        raise ValueError(f"return_lse must be True or False, got {return_lse!r}")
    if not isinstance(strategy, str) or strategy != "ring":
        raise ValueError(f"unknown strategy {strategy!r}; the strategies are ring")


def check_axes(
    names: Sequence[str], seq_axis: str, batch_axes: Sequence[str] | str | None, head_axis: str | None
) -> Axes:
    """The mesh axes by name, with "auto" resolved; `names` are those there are."""
    if not isinstance(seq_axis, str) or not isinstance(head_axis, str | None):
        raise ValueError(
            f"seq_axis must be the name of a mesh axis, and head_axis one or None; got {seq_axis!r}, {head_axis!r}"
        )
    if not (
        isinstance(batch_axes, str | None)
        or (isinstance(batch_axes, Sequence) and all(isinstance(name, str) for name in batch_axes))
    ):
        raise ValueError(f"batch_axes must be names of mesh axes, or None; got {batch_axes!r}")
    if batch_axes == "auto":
        batch = tuple(name for name in STANDARD_BATCH_AXES if name in names and name != seq_axis)
    else:
        batch = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes or ())
    if head_axis == "auto":
        head_axis = STANDARD_HEAD_AXIS if STANDARD_HEAD_AXIS in names else None
    used = [seq_axis, *batch, *([] if head_axis is None else [head_axis])]
    for name in used:
        if name not in names:
            raise ValueError(
                f"the mesh has no axis {name!r}, it has {', '.join(names)}; change the mesh, or "
                f"the axes asked for (seq_axis, batch_axes, head_axis)"
            )
        if used.count(name) > 1:
            raise ValueError(f"mesh axis {name!r} is used twice among seq_axis, batch_axes and head_axis")
    return Axes(seq_axis, batch, head_axis)


def check_arrays(q: Any, k: Any, v: Any) -> None:
    """Types and shapes of q, k and v."""
    if not all(isinstance(x, jax.Array | np.ndarray) for x in (q, k, v)):
        raise ValueError(f"q, k and v must be arrays; got {type(q).__name__}, {type(k).__name__}, {type(v).__name__}")
    shapes = f"got q {q.shape}, k {k.shape}, v {v.shape}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q must be [B, S, H, D], k [B, S, K, D] and v [B, S, K, Dv]; {shapes}")
    if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[1] != v.shape[1]:
        raise ValueError(f"q, k and v must have one batch size, k and v one sequence length; {shapes}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same head dim; {shapes}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"k and v must have the same number of heads; {shapes}")
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise ValueError(f"no dim of q, k, v may be empty; {shapes}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"the number of query heads must be a multiple of the number of key/value heads; {shapes}")
    dtypes = {str(x.dtype) for x in (q, k, v)}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        raise ValueError(
            f"q, k and v must have one dtype, of {', '.join(DTYPES)}; got q {q.dtype}, k {k.dtype}, v {v.dtype}"
        )


def check_lengths(
    compared: bool, q_len: int, k_len: int, segments: tuple[Any, Any], positions: tuple[Any, Any]
) -> None:
    """Queries and keys of different sequences: what is compared must be given for both.

    Args:
      compared: whether the mask or the bias compares positions.
      q_len: number of queries.
      k_len: number of keys.
      segments: of queries and of keys.
      positions: of queries and of keys.
    """
    for names, (of_q, of_k) in (
        (("segment_ids", "kv_segment_ids"), segments),
        (("positions", "kv_positions"), positions),
    ):
        if of_q is None and of_k is not None:
            raise ValueError(f"{names[1]} is given and {names[0]} is not: give both, they are compared")
        if q_len != k_len and of_q is not None and of_k is None:
            raise ValueError(
                f"q has {q_len} tokens and k {k_len}, so {names[0]} cannot serve for both: give {names[1]} too"
            )
    if q_len != k_len and compared and positions[0] is None:
        raise ValueError(
            f"q has {q_len} tokens and k {k_len}, and the mask or ALiBi compares positions: use Mask(causal=False) "
            "without alibi_slopes, or give positions and kv_positions"
        )


def check_sequences(x: Any, batch: int) -> jax.Array | None:
    """The numbers that dropout knows sequences by."""
    return check_tokens("dropout_sequences", x, (batch,))


def check_tokens(name: str, x: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """Segments or positions as int32, refused where int32 could change which of them are equal or come first."""
    if x is None:
        return None
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.integer):
        dims = "[B, S]" if len(shape) == 2 else "[B]"
        raise ValueError(f"{name} must be integers of shape {dims} = {shape}; got {x.dtype} {x.shape}")
    if not np.can_cast(x.dtype, np.int32):
        limits = np.iinfo(np.int32)
        if isinstance(x, jax.Array):
            raise ValueError(
                f"{name} must be int32 or narrower; got {x.dtype}: convert it where the values are known"
            )
        if x.min() < limits.min or x.max() > limits.max:
            raise ValueError(f"{name} must fit into int32; got values from {x.min()} to {x.max()}: renumber them")
    return jnp.asarray(x, jnp.int32)


def check_sinks(sinks: Any, heads: int) -> jax.Array | None:
    """Learned logits, one per head, as float32."""
    if sinks is None:
        return None
    if not isinstance(sinks, jax.Array | np.ndarray) or sinks.shape != (heads,) or not _is_float(sinks):
        raise ValueError(f"sinks must be floating-point numbers of shape [H] = ({heads},); got {_described(sinks)}")
    return jnp.asarray(sinks, jnp.float32)


def check_slopes(slopes: Any, heads: int) -> np.ndarray | None:
    """ALiBi slopes, one per head, as float32 constants."""
    if slopes is None:
        return None
    if isinstance(slopes, Tracer):
        raise ValueError(
            "alibi_slopes are constants and have no gradient: give numbers that are known when the program is "
            "built (static), as alibi_slopes(H) returns them; got a traced array"
        )
    array = np.asarray(slopes)
    if array.shape != (heads,) or not (_is_float(array) and _fits_float32(array)):
        raise ValueError(
            f"alibi_slopes must be finite floating-point numbers of shape [H] = ({heads},); got {_described(slopes)}"
        )
    return array.astype(np.float32)


def check_dropout(rate: Any, seed: Any) -> tuple[float, jax.Array | None]:
    """The rate, and the seed as one uint32."""
    if not (_is_number(rate) and 0 <= rate < 1):
        raise ValueError(f"dropout_rate must be a number of at least 0 and below 1, static; got {rate!r}")
    key = None if seed is None else _seed(seed)
    if rate == 0:
        return 0.0, None
    if key is None:
        raise ValueError(
            f"dropout_rate is {rate} and there is no dropout_seed: give an integer or a jax.random key, another "
            "one in every layer and step"
        )
    return float(rate), key


def _seed(seed: Any) -> jax.Array:
    """One uint32 of an integer or key."""
    if isinstance(seed, jax.Array) and _is_key(seed):
        return jax.random.bits(seed)
    is_one = isinstance(seed, jax.Array | np.ndarray | np.integer) and seed.shape == ()
    if is_one and jnp.issubdtype(seed.dtype, jnp.integer) and seed.dtype.itemsize <= 4:
        return jnp.asarray(seed).astype(jnp.uint32)
    if is_one and isinstance(seed, np.ndarray | np.integer):
        seed = seed.item()
    if isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**32:
        return jnp.asarray(seed, jnp.uint32)
    raise ValueError(
        "dropout_seed must be one integer in [0, 2^32), or an array of one with at most 32 bits, or one jax.random "
        f"key; got {_described(seed)}"
    )


def check_cuts(sizes: dict[str, int], axes: Axes, batch: int, heads: int, kv_heads: int) -> None:
    """Whether the mesh divides batch and heads; `sizes` are those of its axes."""
    parts = math.prod(sizes[name] for name in axes.batch)
    if batch % parts:
        raise ValueError(
            f"the batch size must be a multiple of {parts}, the devices along {', '.join(axes.batch)}; got {batch}"
        )
    if axes.head is not None and (heads % sizes[axes.head] or kv_heads % sizes[axes.head]):
        raise ValueError(
            f"query and key/value heads must be multiples of {sizes[axes.head]}, the devices along "
            f"{axes.head!r}; got {heads} and {kv_heads}"
        )


def _is_key(x: jax.Array) -> bool:
    """Whether x is one jax.random key, of the new kind or of the old."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.shape == ()
    return x.shape == (2,) and x.dtype == jnp.uint32


def _is_number(x: Any) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool) and _fits_float32(x)


def _fits_float32(x: Any) -> bool:
    """Whether all of x is finite, also as float32."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.asarray(x, np.float64).astype(np.float32)).all())


def _is_float(x: jax.Array | np.ndarray) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _described(x: Any) -> str:
    return f"{x.dtype} {x.shape}" if isinstance(x, jax.Array | np.ndarray) else repr(x)
