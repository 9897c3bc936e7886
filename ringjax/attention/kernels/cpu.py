"""Block attention on CPUs: C++ that XLA calls (`cpu_source/`), FlashAttention-2 on tiles that fit a core's caches.

XLA's own products and exponentials leave every tile of scores through memory between them; here they meet in the
first cache. The work of a call is shared by the threads of XLA's own pool, so that it gets on with whatever else the
program does, and is cut by its shapes alone, with sums in one order: results are the same bits in every run.

bfloat16 is multiplied in the CPU's matrix unit (AMX) if it has one, with weights rounded to bfloat16 as in the "xla"
kernel, and otherwise in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.attention.kernels import cpu_library
from ringjax.attention.kernels.base import BlockKernel, Gradients, Order, Relation, Slots
from ringjax.attention.kernels.varying import varying_alike
from ringjax.attention.mask import Tokens
from ringjax.attention.scores import Heads, ScoreRule
from ringjax.attention.softmax import Partial

# Orders of dims in memory, from the slowest, of [B, K, G, L, D] and [B, K, L, D + Dv], by the operand's number, where
# they lie by token.
_OF_QUERIES, _OF_KEYS = (0, 3, 1, 2, 4), (0, 2, 1, 3)
BY_TOKEN = {
    "forward": {0: _OF_QUERIES, 1: _OF_KEYS, 9: _OF_QUERIES},
    "backward": {0: _OF_QUERIES, 1: _OF_KEYS, 11: _OF_QUERIES, 12: _OF_QUERIES, 13: _OF_KEYS},
}
# As the C++ code numbers them.
ORDERS = {Order.ALL: 0, Order.SLOTS: 1, Order.ANY: 2}


@dataclass(frozen=True)
class CpuKernel(BlockKernel):
    """Fused attention for CPUs.

    Attributes:
      by_head: whether what has a head dim lies by head in memory, and not by token. By token is how the operator's
        caller has it: nothing is moved, where that took a quarter of the forward pass. But messages lie in the order
        of their dims, so that in a ring the block of every hop would be; and what is read once in every hop is read
        faster in one piece.
      flags: what the C++ compiler is told of the CPU. Without any, code runs on every CPU of the architecture.
    """

    by_head: bool = False
    flags: tuple[str, ...] = ("-march=native",)
    name = "cpu"

    @property
    def missing(self) -> str | None:
        """What this machine lacks, None if nothing. The first use may compile."""
        return cpu_library.problem(self.flags)

    @property
    def covers_hops(self) -> bool:
        return False  # XLA does one thing after another on a CPU

    def refusal(self, q, kv, relation, rule) -> str | None:
        return self.missing

    def forward(self, q, kv, relation, rule, heads, before, q_slots, k_slots) -> Partial:
        arrays = (*_told(q, kv, relation, rule, heads, q_slots, k_slots), *before)
        return Partial(*self._call("forward", arrays, 2, _settings(relation, rule, q_slots, k_slots)))

    def backward(self, q, kv, relation, rule, heads, lse, delta, dout, before, q_slots, k_slots) -> Gradients:
        arrays = (*_told(q, kv, relation, rule, heads, q_slots, k_slots), lse, delta, dout.astype(q.dtype), *before)
        return Gradients(*self._call("backward", arrays, 2, _settings(relation, rule, q_slots, k_slots)))

    def _call(self, what: str, arrays: tuple, written_over: int, settings: dict[str, Any]) -> Sequence[jax.Array]:
        """Call the C++ function on arrays, the last of which are what the results are added to, in their memory."""
        arrays, _ = varying_alike(arrays)
        first = len(arrays) - written_over
        layouts = [None if self.by_head else BY_TOKEN[what].get(i) for i in range(len(arrays))]
        call = jax.ffi.ffi_call(
            cpu_library.targets(self.flags)[what],
            [jax.typeof(x) for x in arrays[first:]],
            input_layouts=layouts,
            output_layouts=layouts[first:],
            input_output_aliases={first + i: i for i in range(written_over)},
            vmap_method="sequential",
        )
        return call(*arrays, by_head=np.int64(self.by_head), **settings)


def _told(
    q: jax.Array, kv: jax.Array, relation: Relation, rule: ScoreRule, heads: Heads, q_slots: Slots, k_slots: Slots
) -> tuple[jax.Array, ...]:
    """The arrays that forward and backward begin with; empty where there is nothing to tell."""
    numbers = jnp.stack([jnp.asarray(x, jnp.int32) for x in (q_slots.start, k_slots.start, relation.lead.by)])
    placed = rule.needs_positions or relation.order is Order.ANY
    slopes = jnp.zeros((0,), jnp.float32) if heads.slopes is None else heads.slopes
    noise = jnp.zeros((0,), jnp.uint32) if heads.noise is None else heads.noise
    q_tokens, k_tokens = _tokens(relation.q_tokens, placed), _tokens(relation.k_tokens, placed)
    positions, segments = zip(q_tokens, k_tokens, strict=True)
    return q, kv, numbers, *positions, *segments, slopes, noise


def _tokens(tokens: Tokens, placed: bool) -> tuple[jax.Array, jax.Array]:
    none = jnp.zeros((0, 0), jnp.int32)
    positions = tokens.positions if placed and tokens.positions is not None else none
    return positions, none if tokens.segments is None else tokens.segments


def _settings(relation: Relation, rule: ScoreRule, q_slots: Slots, k_slots: Slots) -> dict[str, Any]:
    """What is known when the program is built; -1 and 0 stand for what there is not."""
    mask = relation.mask
    return {
        "q_size": np.int64(q_slots.size),
        "k_size": np.int64(k_slots.size),
        "order": np.int64(ORDERS[relation.order]),
        "stride": np.int64(relation.lead.stride),
        "causal": np.int64(mask.causal),
        "window": np.int64(mask.window or 0),
        "prefix": np.int64(-1 if mask.prefix_length is None else mask.prefix_length),
        "scale": np.float32(rule.scale),
        "softcap": np.float32(rule.softcap or 0),
        "dropped": np.uint32(min(round(rule.dropout * 2**32), 2**32 - 1)),
        "kept_weight": np.float32(1 / (1 - rule.dropout)),
    }
