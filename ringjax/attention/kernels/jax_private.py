"""What ringjax uses of jax that jax does not promise to keep: the halves of two attention kernels.

Splash (TPUs) and cuDNN (NVIDIA GPUs) are public in jax as whole attention functions, whose own gradients know one
block only. A ring needs their forward with the log-sum-exp, and their backward with the log-sum-exp over all blocks.
These entry points have no underscore-free names. Nothing else in ringjax touches them, and before anything does,
`splash_problem` and `cudnn_problem` compare what they take with what this module gives: in a version of jax in which
that differs, the kernels are refused and those of ringjax run.

Seen with jax 0.10.2 to 0.12.0.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_SPLASH_SHARED = ("mask_value", "is_mqa", "attn_logits_soft_cap", "mask_function", "interpret")
_SPLASH_GRADIENT = (
    *("q", "k", "v", "segment_ids", "sinks", "logsumexp", "do", "di", "bq", "bkv", "mask_info"),
    *("q_layout", "k_layout", "v_layout"),
)
_SPLASH_TAKES = {
    "_splash_attention_forward": (
        *("fwd_mask_info", "q", "k", "v", "segment_ids", "sinks", "block_sizes"),
        *("residual_checkpoint_name", "save_residuals", *_SPLASH_SHARED),
    ),
    "_splash_attention_bwd_dq": (*_SPLASH_GRADIENT, *_SPLASH_SHARED),
    "_splash_attention_bwd_dkv": (*_SPLASH_GRADIENT, "bkv_compute", "use_fused_bwd_kernel", *_SPLASH_SHARED),
}
_SPLASH_TABLES = ("data_next", "mask_next", "block_mask", "partial_mask_blocks", "q_sequence")

# Operands that stand for what is not asked for, and parameters; later versions have `score_mod` among both.
_CUDNN_OPERANDS = ("bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k", "page_table_v")
_CUDNN_OPTIONS = ("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length")
_CUDNN_TAKES = {
    "_dot_product_attention_fwd": ("query", "key", "value", *_CUDNN_OPERANDS, *_CUDNN_OPTIONS, "is_training"),
    "_dot_product_attention_bwd": (
        *("query", "key", "value", *_CUDNN_OPERANDS, "activation", "fwd_output", "grad_output", *_CUDNN_OPTIONS),
    ),
}
_CUDNN_SINCE = {"score_mod", "score_mod_args"}


class SplashTables(NamedTuple):
    """Which pairs of tiles Splash visits, and what it sees there.

    Attributes:
      comes: [rows, T] int32, or [T, rows] where tiles of keys stay: the tile that comes at each step.
      needed: of the same shape, 2 where the step is needed and 0 where it is not.
      sees: from slots of queries and of keys to whether they see each other.
    """

    comes: np.ndarray
    needed: np.ndarray
    sees: Callable[[Any, Any], Any]


def splash_problem() -> str | None:
    """Why Splash cannot be used with the jax that is here, None if it can."""
    try:
        splash, info = _splash()
    except ImportError as error:
        return f"jax {jax.__version__} has no Splash attention that is known here ({error})"
    wrong = [name for name, takes in _SPLASH_TAKES.items() if not _lets_be_named(getattr(splash, name, None), takes)]
    if wrong or info.MaskInfo._fields[: len(_SPLASH_TABLES)] != _SPLASH_TABLES:
        return (
            f"jax {jax.__version__} has another Splash attention than is known here: {', '.join(wrong) or 'MaskInfo'}"
        )
    return None


def splash_forward(q, k, v, tables: SplashTables | None, segments, tiles: tuple[int, int], softcap, interpret: bool):
    """out and lse of attention on one sequence.

    Args:
      q: [H, Lq, D], times the scale.
      k: [K, Lk, D].
      v: [K, Lk, Dv].
      tables: None = all pairs see each other.
      segments: those of queries [Lq] and keys [Lk], or None.
      tiles: queries and keys of a tile.
      softcap: or None.
      interpret: run step by step in plain jax.

    Returns:
      out [H, Lq, Dv] in the dtype of q, lse [H, Lq] in float32. Rows that see nothing have an lse below -1e38.
    """
    splash, _ = _splash()
    out, (lse,) = splash._splash_attention_forward(
        *(_tables(tables, q.shape[1]), q, k, v, _segments(segments), None),
        block_sizes=splash.BlockSizes(block_q=tiles[0], block_kv=tiles[1]),
        residual_checkpoint_name=None,
        save_residuals=True,
        **_splash_options(tables, softcap, interpret),
    )
    return out, lse


def splash_dq(q, k, v, lse, delta, dout, tables: SplashTables | None, segments, tiles, softcap, interpret: bool):
    """The gradient of the scaled queries; arguments as in `splash_forward`, lse and delta [H, Lq], dout as out."""
    splash, _ = _splash()
    return splash._splash_attention_bwd_dq(
        *(q, k, v, _segments(segments), None, lse, dout, delta),
        bq=tiles[0],
        bkv=tiles[1],
        mask_info=_tables(tables, q.shape[1]),
        **_splash_layouts(),
        **_splash_options(tables, softcap, interpret),
    )


def splash_dkv(q, k, v, lse, delta, dout, tables: SplashTables | None, segments, tiles, softcap, interpret: bool):
    """The gradients of keys and values; arguments as in `splash_dq`, but tiles of keys stay in `tables`."""
    splash, _ = _splash()
    _, dk, dv = splash._splash_attention_bwd_dkv(
        *(q, k, v, _segments(segments), None, lse, dout, delta),
        bq=tiles[0],
        bkv=tiles[1],
        bkv_compute=tiles[1],
        mask_info=_tables(tables, q.shape[1]),
        use_fused_bwd_kernel=False,
        **_splash_layouts(),
        **_splash_options(tables, softcap, interpret),
    )
    return dk, dv


@cache
def cudnn_problem() -> str | None:
    """Why cuDNN's attention cannot be used with the jax that is here, None if it can."""
    try:
        cudnn = _cudnn()
    except ImportError as error:
        return f"jax {jax.__version__} has no cuDNN attention that is known here ({error})"
    for name, takes in _CUDNN_TAKES.items():
        found = _parameters(getattr(cudnn, f"{name}_impl", None))
        if not hasattr(cudnn, f"{name}_p_wrapper") or tuple(x for x in found if x not in _CUDNN_SINCE) != takes:
            return f"jax {jax.__version__} has another cuDNN attention than is known here: {name}"
    return None


def cudnn_forward(q, k, v, scale: float, causal: bool):
    """out [B, H, Lq, D] in the dtype of q and lse [B, H, Lq] in float32, of k and v [B, K, Lk, D]."""
    options = _cudnn_options("_dot_product_attention_fwd", scale, causal) | {"is_training": True}
    return _cudnn()._dot_product_attention_fwd_p_wrapper.bind(q, k, v, *_not_given(q), **options)


def cudnn_backward(q, k, v, lse, out, dout, scale: float, causal: bool):
    """dq, dk, dv in the dtypes of q, k, v, with p = exp(scale q k - lse) and delta = rowsum(dout * out)."""
    options = _cudnn_options("_dot_product_attention_bwd", scale, causal)
    return _cudnn()._dot_product_attention_bwd_p_wrapper.bind(q, k, v, *_not_given(q), lse, out, dout, **options)


def _splash() -> tuple[Any, Any]:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask_info

    return splash_attention_kernel, splash_attention_mask_info


def _cudnn() -> Any:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def _tables(tables: SplashTables | None, length: int) -> Any:
    _, info = _splash()
    if tables is None:
        return info.MaskInfo(None, None, None, None, None)
    slots = jnp.arange(length, dtype=jnp.int32)
    return info.MaskInfo(jnp.asarray(tables.comes)[None], None, jnp.asarray(tables.needed)[None], None, slots)


def _segments(segments: tuple[jax.Array, jax.Array] | None) -> Any:
    return None if segments is None else _splash()[0].SegmentIds(*segments)


def _splash_options(tables: SplashTables | None, softcap: float | None, interpret: bool) -> dict[str, Any]:
    return {
        "mask_value": _splash()[0].DEFAULT_MASK_VALUE,
        "is_mqa": False,
        "attn_logits_soft_cap": softcap,
        "mask_function": None if tables is None else tables.sees,
        "interpret": interpret,
    }


def _splash_layouts() -> dict[str, Any]:
    return dict.fromkeys(("q_layout", "k_layout", "v_layout"), _splash()[0].QKVLayout.HEAD_DIM_MINOR)


def _cudnn_options(name: str, scale: float, causal: bool) -> dict[str, Any]:
    cudnn = _cudnn()
    options = {
        "scale": scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, no gradient of one
        "mask_type": cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK,
        "layout": cudnn.AttentionLayout.BNTH.value,
        "sliding_window_length": None,
    }
    return options | ({"score_mod": None} if "score_mod" in _parameters(getattr(cudnn, f"{name}_impl")) else {})


def _not_given(like: jax.Array) -> list[jax.Array]:
    return [jnp.zeros(0, like.dtype)] * len(_CUDNN_OPERANDS)


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters) if callable(function) else ()


def _lets_be_named(function: Any, names: tuple[str, ...]) -> bool:
    """Whether a function takes exactly these arguments, in any order after the first six."""
    found = _parameters(function)
    return set(found) == set(names) and found[:6] == names[:6]
