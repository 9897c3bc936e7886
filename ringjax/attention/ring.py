"""The ring: what travels, when, and how the partial results come together.

Queries stay. At step i a device holds the key/value block that was born i ranks before it; each block makes R - 1
hops, one rank up per hop. The hop for the next step is issued before the attention of this one and used after it,
so that the transfer can run under the kernel. The first and the last step stand outside the loop, so that no block
travels in vain, and the size of the program does not depend on R.

Everything in this file runs on one device's block, inside `shard_map`.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from ringjax.attention.kernels.base import BlockKernel, Relation
from ringjax.attention.layout import Layout
from ringjax.attention.mask import Mask, Tokens
from ringjax.attention.meeting import Call, foreign_calls, own_calls
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

        def attend(part: Partial, block: Block, calls: list[Call]) -> Partial:
            for call in calls:
                part = self._call_forward(call, q_BKGLD, tokens, block, part)
            return part

        def step(carry: tuple[Block, Partial], i: jax.Array) -> tuple[tuple[Block, Partial], None]:
            block, part = carry
            following = self._hop(block)
            return (following, attend(part, block, self._calls(i, block.tokens))), None

        arriving = self._hop(block) if self.size > 1 else block
        part = attend(part, block, self._own_calls(tokens))
        if self.size > 2:
            (arriving, part), _ = jax.lax.scan(step, (arriving, part), jnp.arange(1, self.size - 1))
        if self.size > 1:
            part = attend(part, arriving, self._calls(self.size - 1, arriving.tokens))
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

        def attend(dq: jax.Array, block: Block, calls: list[Call]) -> Gradients:
            dkv = filled(q, block.kv.shape)
            for call in calls:
                dq, dkv = self._call_backward(call, rows, block, dq, dkv)
            return dq, dkv

        def step(carry: tuple[Block, Gradients], i: jax.Array) -> tuple[tuple[Block, Gradients], None]:
            block, (dq, dkv) = carry
            following, dkv = self._hop(block), self._hop(dkv)
            dq, share = attend(dq, block, self._calls(i, block.tokens))
            return (following, (dq, dkv + share)), None

        arriving = self._hop(block) if self.size > 1 else block
        dq, own_dkv = attend(filled(q, rows.q.shape), block, self._own_calls(tokens))
        if self.size > 1:
            following = self._hop(arriving) if self.size > 2 else arriving
            dq, dkv = attend(dq, arriving, self._calls(1, arriving.tokens))
            if self.size > 3:
                (following, (dq, dkv)), _ = jax.lax.scan(step, (following, (dq, dkv)), jnp.arange(2, self.size - 1))
            if self.size > 2:
                dkv = self._hop(dkv)
                dq, share = attend(dq, following, self._calls(self.size - 1, following.tokens))
                dkv = dkv + share
            own_dkv = own_dkv + self._hop(dkv)
        dk, dv = jnp.split(own_dkv.swapaxes(1, 2), [k.shape[-1]], axis=-1)
        return _by_token(dq).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    def _own_calls(self, tokens: Tokens) -> list[Call]:
        return own_calls(self.mask, tokens.positions is not None)

    def _calls(self, step: jax.Array | int, tokens: Tokens) -> list[Call]:
        rank = jax.lax.axis_index(self.axis)
        source = (rank - step) % self.size
        return foreign_calls(self.layout, self.mask, tokens.positions is not None, rank, source)

    def _hop(self, x: T) -> T:
        return jax.lax.ppermute(x, self.axis, [(i, (i + 1) % self.size) for i in range(self.size)])

    def _call_forward(self, call: Call, q: jax.Array, tokens: Tokens, block: Block, part: Partial) -> Partial:
        """Merge what one call adds into the partial result."""

        def attend(part: Partial) -> Partial:
            mine = Partial(*(self._take(x, call.q_chunk, 3) for x in part))
            queries, kv = self._take(q, call.q_chunk, 3), self._take(block.kv, call.k_chunk, 2)
            k, v = jnp.split(kv, [q.shape[-1]], axis=-1)
            relation = self._relation(call, tokens, block.tokens)
            new = self.kernel.forward(queries, k, v, relation, self.scale)
            return Partial(*(self._put(x, y, call.q_chunk, 3) for x, y in zip(part, merge(mine, new), strict=True)))

        return attend(part) if call.when is None else jax.lax.cond(call.when, attend, lambda part: part, part)

    def _call_backward(self, call: Call, rows: "_Rows", block: Block, dq: jax.Array, dkv: jax.Array) -> Gradients:
        """Add what one call adds to the gradients of the queries and of the block."""

        def attend(gradients: Gradients) -> Gradients:
            dq, dkv = gradients
            q, dout, lse, delta = (
                self._take(x, call.q_chunk, 3) for x in (rows.q, rows.dout, rows.lse, rows.delta)
            )
            k, v = jnp.split(self._take(block.kv, call.k_chunk, 2), [q.shape[-1]], axis=-1)
            relation = self._relation(call, rows.tokens, block.tokens)
            dq_share, *dkv_share = self.kernel.backward(q, k, v, relation, self.scale, lse, delta, dout)
            dkv_share = jnp.concatenate(dkv_share, axis=-1)
            dq = self._put(dq, self._take(dq, call.q_chunk, 3) + dq_share, call.q_chunk, 3)
            return dq, self._put(dkv, self._take(dkv, call.k_chunk, 2) + dkv_share, call.k_chunk, 2)

        gradients = (dq, dkv)
        return attend(gradients) if call.when is None else jax.lax.cond(call.when, attend, lambda x: x, gradients)

    def _relation(self, call: Call, q_tokens: Tokens, k_tokens: Tokens) -> Relation:
        q_tokens = jax.tree.map(lambda x: self._take(x, call.q_chunk, 1), q_tokens)
        k_tokens = jax.tree.map(lambda x: self._take(x, call.k_chunk, 1), k_tokens)
        return Relation(self.mask, call.order, call.shift, q_tokens, k_tokens)

    def _take(self, x: jax.Array, chunk: jax.Array | int | None, dim: int) -> jax.Array:
        """The slots of one chunk; all of them if there is none to choose."""
        if chunk is None:
            return x
        size = x.shape[dim] // self.layout.chunks
        return jax.lax.dynamic_slice_in_dim(x, chunk * size, size, axis=dim)

    def _put(self, x: jax.Array, part: jax.Array, chunk: jax.Array | int | None, dim: int) -> jax.Array:
        """x with the slots of one chunk replaced."""
        if chunk is None:
            return part
        return jax.lax.dynamic_update_slice_in_dim(x, part, chunk * part.shape[dim], axis=dim)


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
