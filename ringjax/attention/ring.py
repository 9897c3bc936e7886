"""The ring: what travels, when, and how the partial results come together.

Queries stay. At step i a device holds the key/value block that was born i ranks before it; each block makes R - 1
hops, one rank up per hop. The hop for the next step is issued before the attention of this one and used after it,
so that the transfer can run under the kernel. The first and the last step stand outside the loop, so that no block
travels in vain, and the size of the program does not depend on R.

Everything in this file runs on one device's block, inside `shard_map`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from ringjax.attention.kernels.base import BlockKernel, Relation
from ringjax.attention.layout import Layout
from ringjax.attention.mask import Mask, Tokens
from ringjax.attention.meeting import Call, Chunks, foreign_call, own_call
from ringjax.attention.softmax import Partial, filled, merge

T = TypeVar("T")
Gradients = tuple[jax.Array, jax.Array]  # dq [B, K, G, L, D] and dk with dv [B, K, L, D + Dv], float32


class Block(NamedTuple):
    """What travels: one device's keys and values, side by side in one message, and what the mask needs of them."""

    kv: jax.Array  # [B, K, L, D + Dv]
    tokens: Tokens


@dataclass(frozen=True)
class Ring:
    """How one attention runs: everything that is known when the program is built."""

    axis: str
    size: int
    layout: Layout
    mask: Mask
    scale: float
    kernel: BlockKernel

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        """One lap. q [B, L, H, D], k [B, L, K, D], v [B, L, K, Dv] -> out [B, L, H, Dv], lse [B, L, H]."""
        q_BKGLD, block = _by_head(q, k.shape[2]), _pack(k, v, tokens)
        rows = q_BKGLD.shape[:-1]
        part = Partial(filled(q, (*rows, v.shape[-1])), filled(q, rows, -jnp.inf))

        def attend(part: Partial, block: Block, call: Call) -> Partial:
            return self._forward(call, q_BKGLD, tokens, block, part)

        def step(carry: tuple[Block, Partial], i: jax.Array) -> tuple[tuple[Block, Partial], None]:
            block, part = carry
            following = self._hop(block)
            return (following, attend(part, block, self._foreign_call(i, block.tokens))), None

        arriving = self._hop(block) if self.size > 1 else block
        part = attend(part, block, self._own_call(tokens))
        if self.size > 2:
            (arriving, part), _ = jax.lax.scan(step, (arriving, part), jnp.arange(1, self.size - 1))
        if self.size > 1:
            part = attend(part, arriving, self._foreign_call(self.size - 1, arriving.tokens))
        return _by_token(part.out).astype(q.dtype), _by_token(part.lse)

    def backward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        tokens: Tokens,
        out: jax.Array,
        lse: jax.Array,
        dout: jax.Array,
        dlse: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One lap of the blocks, and of their gradients one step behind them -> dq, dk, dv.

        The gradient of a block is born on the first foreign rank, gathers one rank's share per hop and comes home
        with its last hop, where the block's own share waits.
        """
        kv_heads = k.shape[2]
        delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - dlse
        q_BKGLD, dout, lse, delta = (_by_head(x, kv_heads) for x in (q, dout, lse, delta))
        rows = _Rows(q_BKGLD, dout, lse, delta, tokens)
        block = _pack(k, v, tokens)

        def attend(dq: jax.Array, block: Block, call: Call) -> Gradients:
            return self._backward(call, rows, block, (dq, filled(q, block.kv.shape)))

        def step(carry: tuple[Block, Gradients], i: jax.Array) -> tuple[tuple[Block, Gradients], None]:
            block, (dq, dkv) = carry
            following, dkv = self._hop(block), self._hop(dkv)
            dq, share = attend(dq, block, self._foreign_call(i, block.tokens))
            return (following, (dq, dkv + share)), None

        arriving = self._hop(block) if self.size > 1 else block
        dq, own_dkv = attend(filled(q, rows.q.shape), block, self._own_call(tokens))
        if self.size > 1:
            following = self._hop(arriving) if self.size > 2 else arriving
            dq, dkv = attend(dq, arriving, self._foreign_call(1, arriving.tokens))
            if self.size > 3:
                (following, (dq, dkv)), _ = jax.lax.scan(step, (following, (dq, dkv)), jnp.arange(2, self.size - 1))
            if self.size > 2:
                dkv = self._hop(dkv)
                dq, share = attend(dq, following, self._foreign_call(self.size - 1, following.tokens))
                dkv = dkv + share
            own_dkv = own_dkv + self._hop(dkv)
        dk, dv = jnp.split(own_dkv.swapaxes(1, 2), [k.shape[-1]], axis=-1)
        return _by_token(dq).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    def _own_call(self, tokens: Tokens) -> Call:
        return own_call(self.mask, tokens.positions is not None)

    def _foreign_call(self, step: jax.Array | int, tokens: Tokens) -> Call:
        rank = jax.lax.axis_index(self.axis)
        source = (rank - step) % self.size
        return foreign_call(self.layout, self.mask, tokens.positions is not None, rank, source)

    def _hop(self, x: T) -> T:
        return jax.lax.ppermute(x, self.axis, [(i, (i + 1) % self.size) for i in range(self.size)])

    def _forward(self, call: Call, q: jax.Array, tokens: Tokens, block: Block, part: Partial) -> Partial:
        """Merge what a call yields into the partial result."""

        def attend(part: Partial, q_slots: "_Slots", k_slots: "_Slots") -> Partial:
            k, v = jnp.split(k_slots.take(block.kv, 2), [q.shape[-1]], axis=-1)
            relation = _relation(self.mask, call, q_slots, tokens, k_slots, block.tokens)
            new = self.kernel.forward(q_slots.take(q, 3), k, v, relation, self.scale)
            merged = merge(Partial(*(q_slots.take(x, 3) for x in part)), new)
            return Partial(*(q_slots.put(x, y, 3) for x, y in zip(part, merged, strict=True)))

        return self._run(call, attend, part)

    def _backward(self, call: Call, rows: "_Rows", block: Block, gradients: Gradients) -> Gradients:
        """Add what a call yields to the gradients of the queries and of the block."""

        def attend(gradients: Gradients, q_slots: "_Slots", k_slots: "_Slots") -> Gradients:
            dq, dkv = gradients
            q, dout, lse, delta = (q_slots.take(x, 3) for x in (rows.q, rows.dout, rows.lse, rows.delta))
            k, v = jnp.split(k_slots.take(block.kv, 2), [q.shape[-1]], axis=-1)
            relation = _relation(self.mask, call, q_slots, rows.tokens, k_slots, block.tokens)
            dq_share, *dkv_share = self.kernel.backward(q, k, v, relation, self.scale, lse, delta, dout)
            dkv_share = jnp.concatenate(dkv_share, axis=-1)
            dq = q_slots.put(dq, q_slots.take(dq, 3) + dq_share, 3)
            return dq, k_slots.put(dkv, k_slots.take(dkv, 2) + dkv_share, 2)

        return self._run(call, attend, gradients)

    def _run(self, call: Call, attend: Callable[[T, "_Slots", "_Slots"], T], state: T) -> T:
        """Apply `attend` to the whole blocks, or to one pair of chunks after another."""
        if call.chunks is not None:
            size = self.layout.chunks

            def step(state: T, pair: Chunks) -> tuple[T, None]:
                return attend(state, _Slots(pair.q, size), _Slots(pair.k, size)), None

            return jax.lax.scan(step, state, call.chunks)[0]

        def whole(state: T) -> T:
            return attend(state, _Slots(), _Slots())

        return whole(state) if call.when is None else jax.lax.cond(call.when, whole, lambda state: state, state)


class _Slots(NamedTuple):
    """The slots of one of `count` equal chunks of a block, or of the whole block."""

    chunk: jax.Array | None = None
    count: int = 1

    def take(self, x: jax.Array, dim: int) -> jax.Array:
        """These slots of x."""
        if self.chunk is None:
            return x
        size = x.shape[dim] // self.count
        return jax.lax.dynamic_slice_in_dim(x, self.chunk * size, size, axis=dim)

    def put(self, x: jax.Array, part: jax.Array, dim: int) -> jax.Array:
        """x with these slots replaced."""
        if self.chunk is None:
            return part
        return jax.lax.dynamic_update_slice_in_dim(x, part, self.chunk * part.shape[dim], axis=dim)


def _relation(mask: Mask, call: Call, q_slots: _Slots, q: Tokens, k_slots: _Slots, k: Tokens) -> Relation:
    """What the kernel has to know of a call on these slots."""
    q_tokens = jax.tree.map(lambda x: q_slots.take(x, 1), q)
    k_tokens = jax.tree.map(lambda x: k_slots.take(x, 1), k)
    return Relation(mask, call.order, call.shift, q_tokens, k_tokens)


class _Rows(NamedTuple):
    """What the backward pass knows of the queries, grouped by the key/value head they share."""

    q: jax.Array
    dout: jax.Array
    lse: jax.Array
    delta: jax.Array
    tokens: Tokens


def _pack(k: jax.Array, v: jax.Array, tokens: Tokens) -> Block:
    return Block(jnp.concatenate([k, v], axis=-1).swapaxes(1, 2), tokens)


def _by_head(x_BLH: jax.Array, kv_heads: int) -> jax.Array:
    """[B, L, H, ...] -> [B, K, G, L, ...]"""
    batch, length, heads, *rest = x_BLH.shape
    return jnp.moveaxis(x_BLH.reshape(batch, length, kv_heads, heads // kv_heads, *rest), 1, 3)


def _by_token(x_BKGL: jax.Array) -> jax.Array:
    """[B, K, G, L, ...] -> [B, L, H, ...], the inverse of _by_head."""
    x_BLKG = jnp.moveaxis(x_BKGL, 3, 1)
    return x_BLKG.reshape(*x_BLKG.shape[:2], -1, *x_BLKG.shape[4:])
