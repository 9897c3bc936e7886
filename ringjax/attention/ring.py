"""The ring: what travels, when, and how the partial results come together.

Queries stay; blocks of keys and values travel along a `Route`, usually around the ring. The hop for the next step is
issued before the attention of this one and used after it, so that the transfer can run under the kernel. The first
and the last step stand outside the loop, so that no block travels in vain, and the size of the program does not
depend on R.

Everything in this file runs on one device's block, inside `shard_map`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from ringjax.attention.kernels.base import BlockKernel, Order, Relation
from ringjax.attention.layout import Layout
from ringjax.attention.loop import loop
from ringjax.attention.mask import Mask, Tokens
from ringjax.attention.meeting import Call, Chunks, halves
from ringjax.attention.route import Route, routes
from ringjax.attention.scores import Heads, ScoreRule
from ringjax.attention.softmax import Partial, filled

T = TypeVar("T")

# Names of operations in compiled programs, by which one finds out whether the transfers run under the kernels.
HOP_SCOPE, KERNEL_SCOPE = "ring_hop", "block_attention"

Gradients = tuple[jax.Array, jax.Array]  # dq [B, K, G, L, D] and dk with dv [B, K, L, D + Dv], float32


class Side(NamedTuple):
    """What attention needs besides q, k and v; none of it has a gradient."""

    q_tokens: Tokens  # [B, Sq]
    k_tokens: Tokens  # [B, Sk]
    heads: Heads  # [B, H]


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
    rule: ScoreRule
    kernel: BlockKernel

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array, side: Side) -> tuple[jax.Array, jax.Array]:
        """One lap. q [B, L, H, D], k [B, L, K, D], v [B, L, K, Dv] -> out [B, L, H, Dv], lse [B, L, H].

        out is in the dtype of q, lse in float32. Keys may be another number than queries if positions do not matter
        or are given.
        """
        (q_tokens, k_tokens, heads), kv_heads = side, k.shape[2]
        q_BKGLD, block = _by_head(q, kv_heads), _pack(k, v, k_tokens)
        rows = _Rows(q_BKGLD, self._placed(q_tokens, q.shape[1]), _grouped(heads, kv_heads))
        shape = q_BKGLD.shape[:-1]
        part = Partial(filled(q, (*shape, v.shape[-1])), filled(q, shape, -jnp.inf))
        own, routes = self._routes(k_tokens, k.shape[1])

        def attend(part: Partial, block: Block, call: Call, positions: jax.Array) -> Partial:
            return self._forward(call, rows, block, positions, part)

        arriving = [_hop(route, block) if route.steps else block for route in routes]
        part = attend(part, block, own, self._own_positions(k.shape[1]))
        for route, arrived in zip(routes, arriving, strict=True):
            part = self._forward_lap(route, arrived, part, attend)
        return _by_token(part.out).astype(q.dtype), _by_token(part.lse)

    def _forward_lap(self, route: Route, arriving: Block, part: Partial, attend: Callable[..., Partial]) -> Partial:
        """Everything after the first hop and the own block."""
        length = arriving.kv.shape[2]

        def step(carry: tuple[Block, Partial], i: jax.Array) -> tuple[Block, Partial]:
            block, part = carry
            following = _hop(route, block)
            return following, attend(part, block, route.call(i), route.positions(i, length))

        last = route.steps
        if last > 1:
            arriving, part = loop(step, (arriving, part), jnp.arange(1, last))
        if last > 0:
            part = attend(part, arriving, route.call(last), route.positions(last, length))
        return part

    def backward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        side: Side,
        out: jax.Array,
        lse: jax.Array,
        dout: jax.Array,
        dlse: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One lap of the blocks, and of their gradients one step behind them -> dq, dk, dv.

        The gradient of a block is born on the first foreign rank, gathers one rank's share per hop and comes home
        with its last hop, where the block's own share waits.
        """
        (q_tokens, k_tokens, heads), (length, kv_heads) = side, k.shape[1:3]
        delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - dlse
        q_BKGLD, *of_rows = (_by_head(x, kv_heads) for x in (q, dout, lse, delta))
        rows = _Rows(q_BKGLD, self._placed(q_tokens, q.shape[1]), _grouped(heads, kv_heads), *of_rows)
        block = _pack(k, v, k_tokens)
        own, routes = self._routes(k_tokens, length)

        def attend(dq: jax.Array, block: Block, call: Call, positions: jax.Array, rows: "_Rows" = rows) -> Gradients:
            return self._backward(call, rows, block, positions, (dq, filled(q, block.kv.shape)))

        # The own block needs no message: one half of it is there for the first hop to run under, one for the last.
        routes = tuple(route for route in routes if route.steps)
        own_calls = halves(own, q.shape[1]) if routes else [(own, 0, q.shape[1])]
        positions = self._own_positions(length)

        def attend_own(gradients: Gradients, call: Call, start: int, stop: int) -> Gradients:
            dq, dkv = gradients
            mine, share = attend(dq[:, :, :, start:stop], block, call, positions, rows.cut(start, stop))
            return dq.at[:, :, :, start:stop].set(mine), dkv + share

        arriving = [_hop(route, block) for route in routes]
        dq, dkv = attend_own((filled(q, q_BKGLD.shape), filled(q, block.kv.shape)), *own_calls[0])
        for route, arrived in zip(routes, arriving, strict=True):
            dq, share = self._backward_lap(route, arrived, dq, attend)
            dkv = dkv + share
        for rest in own_calls[1:]:
            dq, dkv = attend_own((dq, dkv), *rest)
        dk, dv = jnp.split(dkv.swapaxes(1, 2), [k.shape[-1]], axis=-1)
        return _by_token(dq).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    def _backward_lap(
        self, route: Route, arriving: Block, dq: jax.Array, attend: Callable[..., Gradients]
    ) -> Gradients:
        """Everything after the first hop and the own block -> dq, and the others' share in the own block's dkv."""
        length, last = arriving.kv.shape[2], route.steps

        def step(carry: tuple[Block, Gradients], i: jax.Array) -> tuple[Block, Gradients]:
            block, (dq, dkv) = carry
            following, dkv = _hop(route, block), _hop(route, dkv)
            dq, share = attend(dq, block, route.call(i), route.positions(i, length))
            return following, (dq, dkv + share)

        following = _hop(route, arriving) if last > 1 else arriving
        dq, dkv = attend(dq, arriving, route.call(1), route.positions(1, length))
        if last > 2:
            following, (dq, dkv) = loop(step, (following, (dq, dkv)), jnp.arange(2, last))
        if last > 1:
            dkv = _hop(route, dkv)
            dq, share = attend(dq, following, route.call(last), route.positions(last, length))
            dkv = dkv + share
        with jax.named_scope(HOP_SCOPE):
            return dq, route.home(dkv)

    def _routes(self, k_tokens: Tokens, length: int) -> tuple[Call, tuple[Route, ...]]:
        by_position = k_tokens.positions is not None
        return routes(self.axis, self.size, self.layout, self.mask, by_position, length)

    def _own_positions(self, length: int) -> jax.Array:
        """The layout's positions of this device's block."""
        return self.layout.block_positions(jax.lax.axis_index(self.axis), self.size, length, jnp)

    def _placed(self, tokens: Tokens, length: int) -> Tokens:
        """Tokens with the layout's positions, if they have none of their own."""
        if tokens.positions is not None:
            return tokens
        return tokens._replace(positions=self._own_positions(length)[None])

    def _forward(self, call: Call, rows: "_Rows", block: Block, positions: jax.Array, part: Partial) -> Partial:
        """Merge what a call yields into the partial result."""

        def attend(part: Partial, q_slots: "_Slots", k_slots: "_Slots") -> Partial:
            k, v = jnp.split(k_slots.take(block.kv, 2), [rows.q.shape[-1]], axis=-1)
            relation = self._relation(call, q_slots, rows.tokens, k_slots, block.tokens, positions)
            before, q = Partial(*(q_slots.take(x, 3) for x in part)), q_slots.take(rows.q, 3)
            with jax.named_scope(KERNEL_SCOPE):
                merged = self.kernel.forward(q, k, v, relation, self.rule, rows.heads, before)
            return Partial(*(q_slots.put(x, y, 3) for x, y in zip(part, merged, strict=True)))

        return self._run(call, attend, part)

    def _backward(
        self, call: Call, rows: "_Rows", block: Block, positions: jax.Array, gradients: Gradients
    ) -> Gradients:
        """Add what a call yields to the gradients of the queries and of the block."""

        def attend(gradients: Gradients, q_slots: "_Slots", k_slots: "_Slots") -> Gradients:
            dq, dkv = gradients
            q, dout, lse, delta = (q_slots.take(x, 3) for x in (rows.q, rows.dout, rows.lse, rows.delta))
            k, v = jnp.split(k_slots.take(block.kv, 2), [q.shape[-1]], axis=-1)
            relation = self._relation(call, q_slots, rows.tokens, k_slots, block.tokens, positions)
            rest = relation, self.rule, rows.heads, lse, delta, dout
            with jax.named_scope(KERNEL_SCOPE):
                dq_share, *dkv_share = self.kernel.backward(q, k, v, *rest)
            dkv_share = jnp.concatenate(dkv_share, axis=-1)
            dq = q_slots.put(dq, q_slots.take(dq, 3) + dq_share, 3)
            return dq, k_slots.put(dkv, k_slots.take(dkv, 2) + dkv_share, 2)

        return self._run(call, attend, gradients)

    def _run(self, call: Call, attend: Callable[[T, "_Slots", "_Slots"], T], state: T) -> T:
        """Apply `attend` to the whole blocks, or to one pair of chunks after another."""
        if call.chunks is None:
            return _if(call.when, lambda state: attend(state, _Slots(), _Slots()), state)
        size = self.layout.chunks

        def step(state: T, pair: Chunks) -> T:
            return _if(pair.when, lambda state: attend(state, _Slots(pair.q, size), _Slots(pair.k, size)), state)

        return loop(step, state, call.chunks)

    def _relation(
        self, call: Call, q_slots: "_Slots", q: Tokens, k_slots: "_Slots", k: Tokens, k_positions: jax.Array
    ) -> Relation:
        """What the kernel has to know of a call on these slots."""
        if k.positions is None:
            k = k._replace(positions=k_positions[None])
        if call.order is not Order.ANY and not self.rule.needs_positions:
            q, k = q._replace(positions=None), k._replace(positions=None)
        q_tokens = jax.tree.map(lambda x: q_slots.take(x, 1), q)
        k_tokens = jax.tree.map(lambda x: k_slots.take(x, 1), k)
        return Relation(self.mask, call.order, call.lead, q_tokens, k_tokens)


def _hop(route: Route, x: T) -> T:
    """What arrives from the neighbour."""
    with jax.named_scope(HOP_SCOPE):
        return route.hop(x)


def _if(when: jax.Array | None, apply: Callable[[T], T], state: T) -> T:
    """`apply(state)` where `when` holds; None = always."""
    return apply(state) if when is None else jax.lax.cond(when, apply, lambda state: state, state)


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


class _Rows(NamedTuple):
    """What is known of the queries, grouped by the key/value head they share."""

    q: jax.Array  # [B, K, G, L, D]
    tokens: Tokens
    heads: Heads
    # In the backward pass only.
    dout: Any = None
    lse: Any = None
    delta: Any = None

    def cut(self, start: int, stop: int) -> "_Rows":
        """Some slots of them."""
        q, tokens, heads, *rest = self
        cut_tokens = jax.tree.map(lambda x: x[:, start:stop], tokens)
        return _Rows(q[:, :, :, start:stop], cut_tokens, heads, *(x[:, :, :, start:stop] for x in rest))


def _pack(k: jax.Array, v: jax.Array, tokens: Tokens) -> Block:
    return Block(jnp.concatenate([k, v], axis=-1).swapaxes(1, 2), tokens)


def _grouped(heads: Heads, kv_heads: int) -> Heads:
    """[B, H] -> [B, K, G]"""
    return jax.tree.map(lambda x: x.reshape(x.shape[0], kv_heads, -1), heads)


def _by_head(x_BLH: jax.Array, kv_heads: int) -> jax.Array:
    """[B, L, H, ...] -> [B, K, G, L, ...]"""
    batch, length, heads, *rest = x_BLH.shape
    return jnp.moveaxis(x_BLH.reshape(batch, length, kv_heads, heads // kv_heads, *rest), 1, 3)


def _by_token(x_BKGL: jax.Array) -> jax.Array:
    """[B, K, G, L, ...] -> [B, L, H, ...], the inverse of _by_head."""
    x_BLKG = jnp.moveaxis(x_BKGL, 3, 1)
    return x_BLKG.reshape(*x_BLKG.shape[:2], -1, *x_BLKG.shape[4:])
