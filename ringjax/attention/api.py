"""The public operator: checks what is asked, then runs the ring over global arrays.

The custom gradient stands outside the two `shard_map` calls, one for the forward lap and one for the backward lap:
nothing is ever differentiated through a `shard_map`, which is what lets the operator live inside `vmap`, `scan`,
`jax.checkpoint` and pipelines.
"""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ringjax.attention.kernels import BlockKernel, get_kernel
from ringjax.attention.layout import Layout, get_layout
from ringjax.attention.mask import Mask, Tokens
from ringjax.attention.ring import Ring

STANDARD_BATCH_AXES = ("data", "fsdp")
STANDARD_HEAD_AXIS = "tensor"
T = TypeVar("T")
DTYPES = ("float32", "bfloat16", "float16")


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    seq_axis: str = "seq",
    batch_axes: Sequence[str] | str | None = "auto",
    head_axis: str | None = "auto",
    layout: str = "contiguous",
    mask: Mask = Mask(),  # noqa: B008 (frozen)
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    strategy: str = "ring",
    kernel: str | BlockKernel = "auto",
    return_lse: bool = False,
) -> Any:
    """Exact attention over a sequence that is sharded across a ring of devices.

    For each query i over the keys j it may see, with s_ij = scale * q_i . k_j:

        lse_i = log sum_j exp(s_ij),    out_i = sum_j exp(s_ij - lse_i) v_j

    Each of the R devices of `seq_axis` holds L = S / R tokens. Queries stay; keys and values travel R - 1 hops
    (Ring Attention, arXiv:2310.01889), and partial results are merged in float32. Differentiable in q, k, v, in
    reverse mode; so is the lse. Rows that see no key (padding) have out 0, lse -inf and gradient 0.

    Args:
      q: queries, [B, S, H, D], in layout order; float32, bfloat16 or float16, like k and v.
      k: keys, [B, S, K, D]; H is a multiple of K, and query head h uses key/value head h // (H / K).
      v: values, [B, S, K, Dv].
      mesh: the devices. None = the mesh set with `jax.set_mesh`.
      seq_axis: the mesh axis that is the ring.
      batch_axes: mesh axes that shard B. "auto" = those of "data" and "fsdp" that the mesh has; None = none.
      head_axis: mesh axis that shards H and K. "auto" = "tensor" if the mesh has it; None = none.
      layout: which token sits in which slot: "contiguous" (natural order), "zigzag" or "striped"; see `get_layout`.
      mask: what may attend to what, by global position. Causal by default. Windows and prefixes are not supported
        yet.
      segment_ids: [B, S] integers that fit into int32, in layout order: a token attends inside its own segment
        (packed documents); negative = padding.
      positions: [B, S] integers that fit into int32, in layout order: the positions the mask compares, instead of
        the layout's. Any order is right; the layout's own is faster, since it knows what can be skipped.
      scale: a Python number that multiplies the scores. None = 1 / sqrt(D).
      softcap: not supported yet.
      sinks: not supported yet.
      strategy: "ring".
      kernel: attention of one block against one block: "auto", "xla", or a `BlockKernel`.
      return_lse: also return the log-sum-exp.

    Returns:
      out, [B, S, H, Dv] in the dtype of q, sharded like q; with `return_lse` also lse, [B, S, H] float32.

    Raises:
      ValueError: something asked for is impossible or not supported; the message says what to change.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from ringjax.attention import ring_attention
      >>> mesh = jax.make_mesh((1,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> x = jnp.ones((1, 8, 2, 4))
      >>> ring_attention(x, x, x, mesh=mesh).shape
      (1, 8, 2, 4)
    """
    _check_options(mask, scale, softcap, sinks, strategy)
    mesh = _mesh(mesh)
    axes = _axes(mesh, seq_axis, batch_axes, head_axis)
    _check_arrays(q, k, v)
    segment_ids = _tokens("segment_ids", segment_ids, q.shape)
    positions = _tokens("positions", positions, q.shape)
    ring_layout = get_layout(layout)
    _check_cuts(mesh, axes, ring_layout, q.shape, k.shape[2])
    ring = Ring(
        axis=axes.seq,
        size=mesh.shape[axes.seq],
        layout=ring_layout,
        mask=mask,
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        kernel=get_kernel(kernel),
    )
    # A full mask compares no positions: they need not travel.
    tokens = Tokens(None if mask.is_full else positions, segment_ids)
    out, lse = _compiled_attention(_Program(mesh, axes, ring), q, k, v, tokens)
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class _Axes:
    """Mesh axes of the operator's dims."""

    seq: str
    batch: tuple[str, ...]
    head: str | None


@dataclass(frozen=True)
class _Program:
    """A ring on a mesh: the static part of the operator, and the two laps over global arrays."""

    mesh: Mesh | AbstractMesh
    axes: _Axes
    ring: Ring

    def _specs(self, tokens: Tokens) -> tuple[PartitionSpec, PartitionSpec, Any]:
        """Of arrays with heads and a head dim, of arrays with heads, and of tokens."""
        rows = PartitionSpec(self.axes.batch or None, self.axes.seq)
        heads = PartitionSpec(*rows, self.axes.head)
        return PartitionSpec(*heads, None), heads, jax.tree.map(lambda _: rows, tokens)

    def place(self, arrays: T, specs: Any) -> T:
        """Arrays, moved to where they are needed if the mesh leaves that to the program (Explicit axes)."""
        kinds = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        if AxisType.Explicit not in kinds.values():
            return arrays

        def move(x: jax.Array, spec: PartitionSpec) -> jax.Array:
            names = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
            explicit = [tuple(name for name in some if kinds[name] is AxisType.Explicit) for some in names]
            return jax.sharding.reshard(x, NamedSharding(self.mesh, PartitionSpec(*explicit)))

        return jax.tree.map(move, arrays, specs)

    def forward(self, q, k, v, tokens: Tokens):
        full, heads, token_spec = self._specs(tokens)
        specs = (full, full, full, token_spec)
        lap = jax.shard_map(self.ring.forward, mesh=self.mesh, in_specs=specs, out_specs=(full, heads))
        return lap(*self.place((q, k, v, tokens), specs))

    def backward(self, q, k, v, tokens: Tokens, out, lse, dout, dlse):
        full, heads, token_spec = self._specs(tokens)
        specs = (full, full, full, token_spec, full, heads, full, heads)
        lap = jax.shard_map(self.ring.backward, mesh=self.mesh, in_specs=specs, out_specs=(full, full, full))
        return lap(*self.place((q, k, v, tokens, out, lse, dout, dlse), specs))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(program: _Program, q, k, v, tokens: Tokens):
    return program.forward(q, k, v, tokens)


def _attention_fwd(program: _Program, q, k, v, tokens: Tokens):
    out, lse = program.forward(q, k, v, tokens)
    # Named, so that a rematerialisation policy can keep them and never replay a lap of the ring.
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (out, lse), (q, k, v, tokens, out, lse)


def _attention_bwd(program: _Program, residuals, cotangents):
    q, k, v, tokens, out, lse = residuals
    dq, dk, dv = program.backward(q, k, v, tokens, out, lse, *cotangents)
    return dq, dk, dv, None


_attention.defvjp(_attention_fwd, _attention_bwd)
_compiled_attention = jax.jit(_attention, static_argnums=0)


def _check_options(mask: Mask, scale: float | None, softcap: float | None, sinks, strategy: str) -> None:
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a Mask, such as Mask(causal=True), got {mask!r}")
    if scale is not None and not (isinstance(scale, numbers.Real) and math.isfinite(scale)):
        raise ValueError(f"scale must be a finite number, known when the program is built (static); got {scale!r}")
    asked = {
        "mask.window": mask.window,
        "mask.prefix_length": mask.prefix_length,
        "softcap": softcap,
        "sinks": sinks,
    }
    for name, value in asked.items():
        if value is not None:
            raise ValueError(f"{name} is not supported yet: leave it None")
    if strategy != "ring":
        raise ValueError(f"unknown strategy {strategy!r}; the strategies are ring")


def _mesh(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh:
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if mesh.empty:
        raise ValueError("ring_attention needs a mesh: pass mesh=..., or set one with jax.set_mesh")
    return mesh


def _axes(mesh, seq_axis: str, batch_axes: Sequence[str] | str | None, head_axis: str | None) -> _Axes:
    """The mesh axes by name, with "auto" resolved."""
    if batch_axes == "auto":
        batch = tuple(name for name in STANDARD_BATCH_AXES if name in mesh.axis_names and name != seq_axis)
    else:
        batch = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes or ())
    if head_axis == "auto":
        head_axis = STANDARD_HEAD_AXIS if STANDARD_HEAD_AXIS in mesh.axis_names else None
    names = [seq_axis, *batch, *([head_axis] if head_axis else [])]
    for name in names:
        if name not in mesh.axis_names:
            raise ValueError(
                f"the mesh has no axis {name!r}, it has {', '.join(mesh.axis_names)}; change the mesh, or "
                f"seq_axis, batch_axes or head_axis"
            )
        if names.count(name) > 1:
            raise ValueError(f"mesh axis {name!r} is used twice among seq_axis, batch_axes and head_axis")
    return _Axes(seq_axis, batch, head_axis)


def _check_arrays(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    if not all(isinstance(x, jax.Array | np.ndarray) for x in (q, k, v)):
        raise ValueError(
            f"q, k and v must be arrays; got {type(q).__name__}, {type(k).__name__}, {type(v).__name__}"
        )
    shapes = f"got q {q.shape}, k {k.shape}, v {v.shape}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q must be [B, S, H, D], k [B, S, K, D] and v [B, S, K, Dv]; {shapes}")
    if not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        raise ValueError(f"q, k and v must have the same batch size and sequence length; {shapes}")
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


def _tokens(name: str, x: Any, q_shape: tuple[int, ...]) -> jax.Array | None:
    """Segments or positions as int32, refused where int32 could change which of them are equal or come first."""
    if x is None:
        return None
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    if x.shape != q_shape[:2] or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers of shape [B, S] = {q_shape[:2]}; got {x.dtype} {x.shape}")
    if not np.can_cast(x.dtype, np.int32):
        limits = np.iinfo(np.int32)
        if isinstance(x, jax.Array):
            raise ValueError(
                f"{name} must be int32 or narrower; got {x.dtype}: convert it where the values are known"
            )
        if x.min() < limits.min or x.max() > limits.max:
            raise ValueError(f"{name} must fit into int32; got values from {x.min()} to {x.max()}: renumber them")
    return jnp.asarray(x, jnp.int32)


def _check_cuts(mesh, axes: _Axes, layout: Layout, q_shape: tuple[int, ...], kv_heads: int) -> None:
    batch, seq, heads, _ = q_shape
    layout.check(seq, mesh.shape[axes.seq])
    parts = math.prod(mesh.shape[name] for name in axes.batch)
    if batch % parts:
        raise ValueError(
            f"the batch size must be a multiple of {parts}, the devices along {', '.join(axes.batch)}; got {batch}"
        )
    if axes.head and (heads % mesh.shape[axes.head] or kv_heads % mesh.shape[axes.head]):
        raise ValueError(
            f"query and key/value heads must be multiples of {mesh.shape[axes.head]}, the devices along "
            f"{axes.head!r}; got {heads} and {kv_heads}"
        )
