"""Ring attention in the shape that `flax.nnx.MultiHeadAttention(attention_fn=...)` calls."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.attention.api import ring_attention, ring_attention_shard
from ringjax.attention.mask import Mask


def attention_fn(*, inside_shard_map: bool = False, **options: Any) -> Callable[..., jax.Array]:
    """An `attention_fn` for `flax.nnx.MultiHeadAttention` (and linen's) that runs on the ring.

    Args:
      inside_shard_map: use `ring_attention_shard`.
      **options: of `ring_attention`: mesh, layout, mask, ... Without a mask, the module's `is_causal` decides.
        dropout_rate and dropout_seed come from the module.

    Returns:
      A function of (query, key, value, ...), [..., S, heads, D] each, that refuses what a ring cannot do: mask and
      bias arrays of [S, S], sown weights, dropout masks shared between sequences and heads.

    Raises:
      ValueError: an option that the module decides, or (by the function) something it cannot do.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from ringjax.attention import attention_fn
      >>> mesh = jax.make_mesh((1,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> layer = nnx.MultiHeadAttention(
      ...     2, 8, attention_fn=attention_fn(mesh=mesh), decode=False, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 16, 8)), is_causal=True).shape
      (1, 16, 8)
    """
    decided = {"dropout_rate", "dropout_seed", "return_lse"} & set(options)
    if decided:
        raise ValueError(f"{', '.join(sorted(decided))} cannot be set here: the module decides")
    if not isinstance(inside_shard_map, bool):
        raise ValueError(f"inside_shard_map must be True or False, got {inside_shard_map!r}")
    operator = ring_attention_shard if inside_shard_map else ring_attention
    known = set(inspect.signature(operator).parameters) - {"q", "k", "v"}
    if unknown := set(options) - known:
        raise ValueError(
            f"{operator.__name__} has no option {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}"
        )

    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        promote_dtype: Any = None,
        is_causal: bool = False,
    ) -> jax.Array:
        _refuse(bias, mask, module, precision, promote_dtype)
        dropping = dropout_rate > 0 and not deterministic
        if dropping and broadcast_dropout:
            raise ValueError(
                "dropout on the ring differs between sequences and heads: make the module with "
                "broadcast_dropout=False"
            )
        own_mask = options.get("mask")
        if is_causal and own_mask is not None and not own_mask.causal:
            raise ValueError(f"the module was called with is_causal=True, and attention_fn has mask={own_mask}")
        if not all(isinstance(x, jax.Array | np.ndarray) for x in (query, key, value)):
            raise ValueError(
                f"query, key and value must be arrays; got {type(query).__name__}, {type(key).__name__}, "
                f"{type(value).__name__}"
            )
        if not query.ndim == key.ndim == value.ndim or query.ndim < 3:
            raise ValueError(
                f"query, key and value must be [..., S, heads, D]; got {query.shape}, {key.shape}, {value.shape}"
            )
        arrays = [x.reshape(-1, *x.shape[-3:]) for x in (query, key, value)]
        common = jnp.result_type(*arrays) if dtype is None else dtype
        out = operator(
            *(x.astype(common) for x in arrays),
            **{"mask": Mask(causal=is_causal)} | options,
            dropout_rate=dropout_rate if dropping else 0.0,
            dropout_seed=dropout_rng if dropping else None,
        )
        return out.reshape(*query.shape[:-1], out.shape[-1])

    return attend


def _refuse(bias: Any, mask: Any, module: Any, precision: Any, promote_dtype: Any) -> None:
    if mask is not None or bias is not None:
        raise ValueError(
            "a mask or bias array has a value for every pair of tokens, which no device of a ring could hold: say "
            "what is visible with attention_fn(mask=Mask(...), segment_ids=...), bias with alibi_slopes. (A module "
            "with decode=True makes such a mask: decoding from a cache is not supported here.)"
        )
    if module is not None:
        raise ValueError("sow_weights=True needs the weights of every pair of tokens, which a ring never holds")
    if promote_dtype is not None:
        raise ValueError("promote_dtype is not supported: give query, key and value one dtype, or use dtype")
    if precision not in (None, "highest", jax.lax.Precision.HIGHEST):
        raise ValueError(f"the ring computes with precision 'highest'; got precision={precision!r}: leave it None")
