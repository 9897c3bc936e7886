"""Block attention for NVIDIA GPUs by cuDNN, as jax ships it."""

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp

from ringjax.attention.kernels import jax_private
from ringjax.attention.kernels.base import BlockKernel, Gradients, Order, Relation
from ringjax.attention.kernels.gpu import GpuKernel
from ringjax.attention.kernels.guard import checked_by_jax, guarded, insist
from ringjax.attention.scores import ScoreRule
from ringjax.attention.softmax import Partial, merge


@dataclass(frozen=True)
class CudnnKernel(BlockKernel):
    """cuDNN's fused attention, for calls without a mask and for plain causal ones.

    Its results come in the dtype of its inputs. Where a call gives the whole result, as in a ring of one, that is
    what the operator rounds to anyway. In a longer ring each hop's part is rounded before it is added, and the
    gradients err more: see `registry`. No memory of the caller's is written to, and the merge is a pass of its own.

    Attributes:
      exact: the kernel that does a call again in which something is not finite.
    """

    exact: BlockKernel = GpuKernel()  # noqa: RUF009 (frozen)
    name = "cudnn"

    @property
    def check_vma(self) -> bool:
        return False

    def refusal(self, q, kv, relation, rule) -> str | None:
        dim, value_dim, (q_len, k_len) = q.shape[-1], kv.shape[-1] - q.shape[-1], (q.shape[3], kv.shape[2])
        if q.dtype not in (jnp.bfloat16, jnp.float16):
            return f"it computes in bfloat16 and float16, got {q.dtype}"
        if dim != value_dim or dim % 8 or dim > 128:
            return f"D and Dv must be equal, a multiple of 8 and at most 128; got {dim} and {value_dim}"
        if q_len % 64 or k_len % 64:
            return f"numbers of queries and keys must be multiples of 64; got {q_len} and {k_len}"
        return _unmet(relation, rule, q_len, k_len) or checked_by_jax(q, kv) or jax_private.cudnn_problem()

    def forward(self, q, kv, relation, rule, heads, before, q_slots, k_slots) -> Partial:
        of_slots = (q_slots.take(q, 3), k_slots.take(kv, 2))
        insist(self, *of_slots, relation, rule)

        def again() -> Partial:
            return self.exact.forward(q, kv, relation, rule, heads, before, q_slots, k_slots)

        causal, rows = relation.order is Order.SLOTS, of_slots[0].shape[:4]
        out, lse = jax_private.cudnn_forward(*_arrays(*of_slots), rule.scale, causal)
        part = Partial(out.astype(jnp.float32).reshape(*rows, -1), lse.reshape(rows))
        merged = merge(Partial(*(q_slots.take(x, 3) for x in before)), part)
        result = Partial(*(q_slots.put(x, new, 3) for x, new in zip(before, merged, strict=True)))
        return guarded(result, of_slots, again)

    def backward(self, q, kv, relation, rule, heads, lse, delta, dout, before, q_slots, k_slots) -> Gradients:
        of_rows = [q_slots.take(x, 3) for x in (lse, delta, dout)]
        of_slots = (q_slots.take(q, 3), k_slots.take(kv, 2))
        insist(self, *of_slots, relation, rule)

        def again() -> Gradients:
            rows = (lse, delta, dout)
            return self.exact.backward(q, kv, relation, rule, heads, *rows, before, q_slots, k_slots)

        shape = of_slots[0].shape
        lse_BHL, out, dout_BHLD = (_by_head(x) for x in (of_rows[0], stand_in(*of_rows[1:]), of_rows[2]))
        causal = relation.order is Order.SLOTS
        dq, *dkv = jax_private.cudnn_backward(*_arrays(*of_slots), lse_BHL, out, dout_BHLD, rule.scale, causal)
        dq, dkv = dq.astype(jnp.float32).reshape(shape), jnp.concatenate(dkv, axis=-1).astype(jnp.float32)
        result = Gradients(
            q_slots.put(before.dq, q_slots.take(before.dq, 3) + dq, 3),
            k_slots.put(before.dkv, k_slots.take(before.dkv, 2) + dkv, 2),
        )
        return guarded(result, (*of_slots, *of_rows, out), again)


def stand_in(delta: jax.Array, dout: jax.Array) -> jax.Array:
    """Something like an out: of the shape and dtype of dout, and such that rowsum(dout * it) = delta.

    cuDNN takes the out and works out delta from it, without the part that comes from the cotangent of the lse. Of all
    that give delta, this is the shortest, delta dout / |dout|^2; it is not longer than the out itself where that
    cotangent is 0, and rounding it changes delta no more than rounding the out does.

    Where a row of dout is 0 and its delta is not, there is none: NaN, by which `guarded` sees it.
    """
    dout_f32 = dout.astype(jnp.float32)
    top = jnp.abs(dout_f32).max(-1)
    none = top == 0
    unit = dout_f32 / jnp.where(none, 1.0, top)[..., None]
    length = delta / jnp.where(none, 1.0, top * (unit * unit).sum(-1))
    length = jnp.where(none & (delta != 0), jnp.nan, length)
    return (unit * length[..., None]).astype(dout.dtype)


def _unmet(relation: Relation, rule: ScoreRule, q_len: int, k_len: int) -> str | None:
    """What a call asks for that cuDNN does not do, or not exactly."""
    mask, lead = relation.mask, relation.lead
    if rule.softcap is not None or rule.alibi or rule.dropout:
        return "it knows no softcap, no ALiBi and no dropout that is the same on every mesh"
    if relation.q_tokens.segments is not None:
        return "it knows no documents and no padding (segment_ids)"
    if relation.order is Order.ALL:
        return None
    if relation.order is Order.ANY:
        return "it knows no positions that are data, and no prefix"
    if not mask.causal or mask.window is not None:
        return "it is used for causal and for full masks only, not for windows"
    if q_len != k_len or (lead.low, lead.high) != (0, 0):
        return "a causal mask must begin at the same position for queries and keys"
    return None


def _arrays(q: jax.Array, kv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _by_head(q), *jnp.split(kv, [q.shape[-1]], axis=-1)


def _by_head(x: jax.Array) -> jax.Array:
    """[B, K, G, ...] -> [B, H, ...]"""
    return x.reshape(x.shape[0], prod(x.shape[1:3]), *x.shape[3:])
