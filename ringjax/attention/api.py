"""The public operator: checks what is asked, fills lengths that do not divide, and runs the ring."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh

from ringjax.attention.checks import (
    check_arrays,
    check_axes,
    check_cuts,
    check_dropout,
    check_lengths,
    check_options,
    check_sequences,
    check_sinks,
    check_slopes,
    check_tokens,
)
from ringjax.attention.kernels import BlockKernel, get_kernel
from ringjax.attention.layout import Layout, get_layout
from ringjax.attention.mask import AnyArray, Mask, Tokens
from ringjax.attention.program import GlobalProgram, LocalProgram, attention, compiled_attention
from ringjax.attention.ring import Ring, Side
from ringjax.attention.scores import Heads, ScoreRule, head_noise
from ringjax.attention.softmax import finite_or_zero, sink_share


def ring_attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    seq_axis: str = "seq",
    batch_axes: Sequence[str] | str | None = "auto",
    head_axis: str | None = "auto",
    layout: str = "contiguous",
    mask: Mask = Mask(),  # noqa: B008 (frozen)
    segment_ids: AnyArray | None = None,
    positions: AnyArray | None = None,
    kv_segment_ids: AnyArray | None = None,
    kv_positions: AnyArray | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: AnyArray | None = None,
    alibi_slopes: Any = None,
    dropout_rate: float = 0.0,
    dropout_seed: Any = None,
    dropout_sequences: AnyArray | None = None,
    strategy: str = "ring",
    kernel: str | BlockKernel = "auto",
    return_lse: bool = False,
) -> Any:
    """Exact attention over a sequence that is sharded across a ring of devices.

    For each query i over the keys j it may see, with positions p:

        s_ij = softcap tanh(scale q_i . k_j / softcap) - slope |p_i - p_j|        (each part only if asked for)
        lse_i = log sum_j exp(s_ij)
        out_i = sum_j exp(s_ij - lse_i) v_j                                        (times sigmoid(lse_i - sink))

    Each of the R devices of `seq_axis` holds L = S / R tokens. Queries stay; keys and values travel R - 1 hops
    (Ring Attention, arXiv:2310.01889), fewer if a window is short, and partial results are merged in float32.
    Differentiable in q, k, v and sinks, in reverse mode; so is the lse. Rows that see no key (padding) have out 0,
    lse -inf and gradient 0. A value that is not finite reaches no row that may not see it.

    Args:
      q: queries, [B, S, H, D], in layout order; float32, bfloat16 or float16, like k and v. S need not be a multiple
        of R: missing slots are filled with padding inside.
      k: keys, [B, S, K, D]; H is a multiple of K, and query head h uses key/value head h // (H / K). The length may
        differ from that of q if the mask compares no positions, or they are given (cross-attention).
      v: values, [B, S, K, Dv].
      mesh: the devices. None = the mesh set with `jax.set_mesh`.
      seq_axis: the mesh axis that is the ring.
      batch_axes: mesh axes that shard B. "auto" = those of "data" and "fsdp" that the mesh has; None = none.
      head_axis: mesh axis that shards H and K. "auto" = "tensor" if the mesh has it; None = none.
      layout: which token sits in which slot: "contiguous" (natural order), "zigzag" or "striped"; see `get_layout`.
      mask: what may attend to what, by global position: causal (default), full, windows, prefixes; see `Mask`.
      segment_ids: [B, S] integers that fit into int32, in layout order: a token attends inside its own segment
        (packed documents); negative = padding.
      positions: [B, S] integers that fit into int32, in layout order: what the mask, ALiBi and dropout take for
        positions, instead of the layout's. Any order is right; the layout's own is faster, since it knows what can
        be skipped.
      kv_segment_ids: the same of the keys, for cross-attention. None = those of the queries.
      kv_positions: likewise.
      scale: a Python number that multiplies the scores. None = 1 / sqrt(D).
      softcap: bound on the scores before the bias; a Python number. None = none.
      sinks: [H] floating point: a learned logit per head that joins the softmax and has no value. The lse is that
        of the keys alone.
      alibi_slopes: [H] floating-point constants: s_ij is lowered by slope times distance (arXiv:2108.12409); see
        `alibi_slopes`.
      dropout_rate: share of the attention weights that is dropped, a Python number in [0, 1). The others are
        divided by 1 - rate; the lse is that without dropout.
      dropout_seed: an integer or a jax.random key. What is dropped is a function of seed, sequence, head and the two
        positions alone: the same on every mesh, layout and ring size.
      dropout_sequences: [B] integers that fit into int32, what dropout takes for the number of each sequence. None =
        its batch index; give them where a batch is one of several parts.
      strategy: "ring".
      kernel: attention of one block against one block: "auto" (the best one for the mesh's devices), "xla", "cpu",
        "tpu", "splash", "gpu", "cudnn", or a `BlockKernel`. A kernel that is named refuses what it cannot do.
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
    check_options(mask, scale, softcap, strategy, return_lse)
    mesh = _mesh(mesh, seq_axis, q)
    axes = check_axes(mesh.axis_names, seq_axis, batch_axes, head_axis)
    check_arrays(q, k, v)
    sizes, size = dict(mesh.shape), mesh.shape[axes.seq]
    (batch, _, num_heads, dim), kv_heads = q.shape, k.shape[2]
    check_cuts(sizes, axes, batch, num_heads, kv_heads)
    sinks, slopes = check_sinks(sinks, num_heads), check_slopes(alibi_slopes, num_heads)
    rule, seed = _rule(dim, scale, softcap, slopes, dropout_rate, dropout_seed)
    sequences = check_sequences(dropout_sequences, batch)
    tokens = _tokens(q, k, mask, rule, segment_ids, positions, kv_segment_ids, kv_positions)
    if positions is None:
        mask = mask.within(k.shape[1])
    device = _device(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh)
    block_kernel = get_kernel(kernel, *device, whole=size == 1)
    ring = Ring(axes.seq, size, get_layout(layout), mask, rule, block_kernel)

    fill_q, fill_k = (_Filling(ring.layout, x.shape[1], size) for x in (q, k))
    if fill_q.needed or fill_k.needed:
        tokens = _filled_tokens(tokens, fill_q, fill_k, batch, mask)
        q, k, v = fill_q.fill(q), fill_k.fill(k), fill_k.fill(v)
    sequences = jnp.arange(batch) if sequences is None else sequences
    heads = _heads(slopes, seed, sequences, jnp.arange(num_heads))
    program = GlobalProgram(mesh, axes, ring)
    out, lse = compiled_attention(program, q, k, v, Side(*tokens, heads))
    if fill_q.needed:
        out, lse = fill_q.take(out), fill_q.take(lse)
    return _finished(out, lse, sinks, return_lse)


def ring_attention_shard(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    seq_axis: str = "seq",
    batch_axes: Sequence[str] | str | None = "auto",
    head_axis: str | None = "auto",
    layout: str = "contiguous",
    mask: Mask = Mask(),  # noqa: B008 (frozen)
    segment_ids: AnyArray | None = None,
    positions: AnyArray | None = None,
    kv_segment_ids: AnyArray | None = None,
    kv_positions: AnyArray | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: AnyArray | None = None,
    alibi_slopes: Any = None,
    dropout_rate: float = 0.0,
    dropout_seed: Any = None,
    dropout_sequences: AnyArray | None = None,
    strategy: str = "ring",
    kernel: str | BlockKernel = "auto",
    return_lse: bool = False,
) -> Any:
    """`ring_attention` for callers who are inside `jax.shard_map` already and hold one device's blocks.

    All arrays are the device's own: q [B, L, H, D], k [B, L, K, D], v [B, L, K, Dv], tokens [B, L], sinks and
    alibi_slopes [H], with the B and H of this device. L must be a multiple of the layout's chunks. The meaning of
    every argument is that of `ring_attention`.

    Args:
      q: queries.
      k: keys.
      v: values.
      seq_axis: the mesh axis that is the ring; it must be manual here.
      batch_axes: manual mesh axes that shard B; only dropout needs to know. "auto" = those of "data" and "fsdp" that
        are manual here.
      head_axis: likewise for H. "auto" = "tensor" if it is manual here.
      layout: see `ring_attention`, like everything below.
      mask: what may attend to what.
      segment_ids: packed documents and padding.
      positions: instead of the layout's.
      kv_segment_ids: of the keys, for cross-attention.
      kv_positions: of the keys, for cross-attention.
      scale: of the scores.
      softcap: bound on the scores.
      sinks: learned logits.
      alibi_slopes: constants.
      dropout_rate: share of the weights that is dropped.
      dropout_seed: the same on all devices.
      dropout_sequences: numbers of this device's sequences.
      strategy: "ring".
      kernel: attention of one block against one block.
      return_lse: also return the log-sum-exp.

    Returns:
      out, [B, L, H, Dv], and with `return_lse` lse, [B, L, H] float32.

    Raises:
      ValueError: as in `ring_attention`, or the call is not inside a `shard_map` over seq_axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec
      >>> from ringjax.attention import ring_attention_shard
      >>> mesh = jax.make_mesh((1,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> blocks = PartitionSpec(None, "seq")
      >>> attend = jax.shard_map(ring_attention_shard, mesh=mesh, in_specs=(blocks,) * 3, out_specs=blocks)
      >>> x = jnp.ones((1, 8, 2, 4))
      >>> attend(x, x, x).shape
      (1, 8, 2, 4)
    """
    check_options(mask, scale, softcap, strategy, return_lse)
    manual = _manual_axes()
    if seq_axis not in manual:
        raise ValueError(
            f"ring_attention_shard works inside a jax.shard_map that is manual over seq_axis={seq_axis!r}; manual "
            f"axes here: {', '.join(manual) or 'none'}. Outside of one, call ring_attention"
        )
    axes = check_axes(manual, seq_axis, batch_axes, head_axis)
    check_arrays(q, k, v)
    size, ring_layout = jax.lax.axis_size(axes.seq), get_layout(layout)
    for x in (q, k):
        ring_layout.check(x.shape[1] * size, size)
    batch, _, num_heads, dim = q.shape
    sinks, slopes = check_sinks(sinks, num_heads), check_slopes(alibi_slopes, num_heads)
    rule, seed = _rule(dim, scale, softcap, slopes, dropout_rate, dropout_seed)
    tokens = _tokens(q, k, mask, rule, segment_ids, positions, kv_segment_ids, kv_positions)
    sequences = check_sequences(dropout_sequences, batch)
    sequences = _numbers(axes.batch, batch) if sequences is None else sequences
    heads = _heads(slopes, seed, sequences, _numbers((axes.head,) if axes.head else (), num_heads))
    if positions is None:
        mask = mask.within(k.shape[1] * size)
    block_kernel = get_kernel(kernel, *_device(jax.sharding.get_abstract_mesh()), whole=size == 1)
    ring = Ring(axes.seq, size, ring_layout, mask, rule, block_kernel)
    inputs = _varying_alike((q, k, v, Side(*tokens, heads)), axes.seq)
    out, lse = attention(LocalProgram(ring), *inputs)  # type: ignore[misc]
    return _finished(out, lse, sinks, return_lse)


class _Filling:
    """Padding that makes a length fill the blocks of a ring, and its removal."""

    def __init__(self, layout: Layout, length: int, ring: int) -> None:
        self.length = length
        self.full = layout.filled(length, ring)
        self.needed = self.full > length
        self._at_end = layout.stride(ring) == 1 and layout.chunks == 1
        if self.needed:
            self._real = layout.positions(self.full, ring) < length

    def fill(self, x: AnyArray, value: int = 0) -> jax.Array:
        """x [B, length, ...] with padding in the slots of the tokens that are not there."""
        if not self.needed:
            return jnp.asarray(x)
        widths = [(0, 0), (0, self.full - self.length)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, widths)
        if not self._at_end:
            # Slot of the input for each slot of the result; those of padding take one that has been added.
            source = np.where(self._real, np.cumsum(self._real) - 1, self.length)
            x = x.take(source, axis=1)
        # Not as the value of the pad: where one array is padded twice with two values, XLA's partitioner gives both
        # the first one (jax 0.10.2).
        return jnp.where(self._real.reshape(1, -1, *[1] * (x.ndim - 2)), x, value) if value else x

    def take(self, x: jax.Array) -> jax.Array:
        """The inverse of `fill`."""
        return x[:, : self.length] if self._at_end else x.take(np.flatnonzero(self._real), axis=1)


def _filled_tokens(
    tokens: tuple[Tokens, Tokens], fill_q: _Filling, fill_k: _Filling, batch: int, mask: Mask
) -> tuple[Tokens, Tokens]:
    """Tokens of both sides, with segments that mark the padding where the mask would not hide it."""
    q, k = tokens
    if q.segments is None and not (mask.causal and q.positions is None):
        q = q._replace(segments=jnp.zeros((batch, fill_q.length), jnp.int32))
        k = k._replace(segments=jnp.zeros((batch, fill_k.length), jnp.int32))

    def fill(filling: _Filling, tokens: Tokens) -> Tokens:
        positions, segments = tokens
        return Tokens(
            None if positions is None else filling.fill(positions),
            None if segments is None else filling.fill(segments, -1),
        )

    return fill(fill_q, q), fill(fill_k, k)


def _tokens(
    q: AnyArray,
    k: AnyArray,
    mask: Mask,
    rule: ScoreRule,
    segment_ids: Any,
    positions: Any,
    kv_segment_ids: Any,
    kv_positions: Any,
) -> tuple[Tokens, Tokens]:
    """Tokens of queries and keys, checked; without positions if nothing depends on them."""
    of_q, of_k = (q.shape[0], q.shape[1]), (k.shape[0], k.shape[1])
    compared = not mask.is_full or rule.alibi
    check_lengths(compared, of_q[1], of_k[1], (segment_ids, kv_segment_ids), (positions, kv_positions))
    segments = check_tokens("segment_ids", segment_ids, of_q)
    places = check_tokens("positions", positions, of_q)
    kv_segments = check_tokens("kv_segment_ids", kv_segment_ids, of_k)
    kv_places = check_tokens("kv_positions", kv_positions, of_k)
    kv_segments = segments if kv_segments is None else kv_segments
    kv_places = places if kv_places is None else kv_places
    if mask.is_full and not rule.needs_positions:
        places = kv_places = None  # nothing compares them: they need not travel
    return Tokens(places, segments), Tokens(kv_places, kv_segments)


def _heads(slopes: np.ndarray | None, seed: jax.Array | None, sequences: jax.Array, heads: jax.Array) -> Heads:
    """What differs between sequences and heads, [B, H] each, for sequences and heads of these numbers."""
    shape = (sequences.shape[0], heads.shape[0])
    return Heads(
        None if slopes is None else jnp.broadcast_to(jnp.asarray(slopes), shape),
        None if seed is None else head_noise(seed, sequences, heads),
    )


def _rule(
    dim: int, scale: float | None, softcap: float | None, slopes: np.ndarray | None, rate: Any, seed: Any
) -> tuple[ScoreRule, jax.Array | None]:
    """What happens to scores, and the seed of dropout, checked."""
    rate, seed = check_dropout(rate, seed)
    return ScoreRule(dim**-0.5 if scale is None else float(scale), softcap, rate, slopes is not None), seed


def _finished(out: jax.Array, lse: jax.Array, sinks: jax.Array | None, return_lse: bool) -> Any:
    """What the caller gets: with sinks out * exp(lse) / (exp(lse) + exp(sink)), and the lse if asked for."""
    if sinks is not None:
        share = sink_share(finite_or_zero(lse) - sinks)  # 0 stays 0 where there is no key
        out = (out.astype(jnp.float32) * share[..., None]).astype(out.dtype)
    return (out, lse) if return_lse else out


def _mesh(mesh: Mesh | AbstractMesh | None, seq_axis: str, q: Any) -> Mesh | AbstractMesh:
    context = jax.sharding.get_abstract_mesh()
    if seq_axis in _manual_axes():
        raise ValueError(
            f"ring_attention takes global arrays, and this is inside a jax.shard_map that is manual over "
            f"{seq_axis!r}: call ring_attention_shard on the local blocks"
        )
    if mesh is None:
        mesh = context
    elif not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, as jax.make_mesh gives it; got {mesh!r}")
    elif not context.empty and context != (mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh):
        raise ValueError(
            f"mesh is {dict(mesh.shape)}, and the mesh set here (jax.set_mesh) is {dict(context.shape)}: leave out "
            "mesh=..., or give the one that is set"
        )
    elif isinstance(mesh, AbstractMesh) and context.empty and not isinstance(q, Tracer):
        raise ValueError("an abstract mesh has no devices: give the mesh itself, or call inside jax.jit")
    if mesh.empty:
        raise ValueError("ring_attention needs a mesh: pass mesh=..., or set one with jax.set_mesh")
    return mesh


def _device(mesh: AbstractMesh) -> tuple[str, str]:
    """Platform and kind of the mesh's devices, which need not be this machine's.

    A mesh of no devices runs on jax's default ones.
    """
    device = mesh.abstract_device or jax.devices()[0]
    return device.platform, device.device_kind


def _manual_axes() -> tuple[str, ...]:
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def _numbers(axes: tuple[str, ...], count: int) -> jax.Array:
    """Global numbers of this device's `count` sequences or heads, which `axes` shard."""
    index = jnp.int32(0)
    for axis in axes:
        index = index * jax.lax.axis_size(axis) + jax.lax.axis_index(axis)
    return index * count + jnp.arange(count)


def _varying_alike(arrays: Any, seq_axis: str) -> Any:
    """Arrays that are all seen as different on the same manual axes, so that one loop can carry them.

    The gradient of this is a sum over the axes that are added: what all devices used gets the gradients of all.
    """
    axes: frozenset[str] = frozenset().union(*map(_varying, jax.tree.leaves(arrays)))
    if not axes:
        return arrays  # the caller's shard_map does not keep track (check_vma=False)

    def add(x: jax.Array) -> jax.Array:
        missing = tuple((axes | {seq_axis}) - _varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(add, arrays)


def _varying(x: jax.Array) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)
