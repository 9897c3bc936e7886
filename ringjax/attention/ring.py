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

from ringjax.attention.kernels.base import BlockKernel, Gradients, Order, Relation, Slots, all_slots
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

        routes = tuple(route for route in routes if route.steps)
        arriving = [_hop(route, block) for route in routes]
        # The own block needs no message: one part of it is there for the first hop to run under, one for the last.
        (dq, dkv), finish = self._backward_own(own, rows, block, cut=len(routes) > 0)
        # No later transfer may use up the work that stands here for the first ones.
        dq, arriving = jax.lax.optimization_barrier((dq, arriving))
        homes = []
        for route, arrived in zip(routes, arriving, strict=True):
            dq, home = self._backward_lap(route, rows, arrived, dq)
            homes.append(home)
        # Packed once more rather than kept for the whole lap.
        dq, k, v = jax.lax.optimization_barrier((dq, k, v))
        dq, dkv = finish(_pack(k, v, k_tokens), Gradients(dq, dkv))
        for home in homes:
            dkv = dkv + home
        dk, dv = jnp.split(dkv.swapaxes(1, 2), [k.shape[-1]], axis=-1)
        return _by_token(dq).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    def _backward_own(
        self, own: Call, rows: "_Rows", block: Block, cut: bool
    ) -> tuple[Gradients, Callable[[Block, Gradients], Gradients]]:
        """A part of what the own block yields, and what adds the rest; if it is not to be cut, all and nothing.

        The parts are dq and dkv if the kernel computes them apart, since dkv then takes no memory before it is
        needed, and otherwise the two halves of the queries.
        """
        length = rows.q.shape[3]
        positions = self._own_positions(block.kv.shape[2])
        dq, dkv = filled(rows.q, rows.q.shape), filled(block.kv, block.kv.shape)

        def attend(call: Call, q_slots: Slots, block: Block, gradients: Gradients) -> Gradients:
            return self._backward(call, q_slots, rows, block, positions, gradients)

        if not cut:
            return attend(own, all_slots(length), block, Gradients(dq, dkv)), lambda _, gradients: gradients
        if self.kernel.apart:

            def finish_keys(block: Block, gradients: Gradients) -> Gradients:
                dq, nothing = _nothing_yet(gradients.dq, block.kv)
                return Gradients(dq, attend(own, all_slots(length), block, Gradients(None, nothing)).dkv)

            return attend(own, all_slots(length), block, Gradients(dq, None)), finish_keys
        first, *rest = halves(own, length)

        def finish_queries(block: Block, gradients: Gradients) -> Gradients:
            for call, q_slots in rest:
                gradients = attend(call, q_slots, block, gradients)
            return gradients

        return attend(*first, block, Gradients(dq, dkv)), finish_queries

    def _backward_lap(self, route: Route, rows: "_Rows", arriving: Block, dq: jax.Array) -> Gradients:
        """Everything after the first hop and the own block -> dq, and the others' share in the own block's dkv."""
        last = route.steps

        def step(carry: tuple[Block, Gradients], i: jax.Array | int) -> tuple[Any, Gradients]:
            return self._backward_step(route, i, rows, *carry, following=True)

        carry = arriving, Gradients(dq, None)
        if last > 1:
            carry = step(carry, 1)
        if last > 2:
            carry = loop(step, carry, jnp.arange(2, last))
        _, gradients = self._backward_step(route, last, rows, *carry, following=False)
        with jax.named_scope(HOP_SCOPE):
            return gradients._replace(dkv=route.home(gradients.dkv))

    def _backward_step(
        self, route: Route, step: jax.Array | int, rows: "_Rows", block: Block, gradients: Gradients, following: bool
    ) -> tuple[Block | None, Gradients]:
        """Add what one foreign block yields, and fetch the one that follows, if one does.

        The block's dkv, None if nobody has added to it, is still with the neighbour.
        """
        dq, dkv = gradients
        call, positions = route.call(step), route.positions(step, block.kv.shape[2])

        def attend(block: Block, gradients: Gradients) -> Gradients:
            return self._backward(call, all_slots(rows.q.shape[3]), rows, block, positions, gradients)

        arrived = None if dkv is None else _hop(route, dkv)
        if self.kernel.apart:
            # The gradient comes under dq, and dkv is added to it in place; the next block comes under dkv. With one
            # transfer in flight at a time, which is as many as compilers for GPUs keep, each gets work to run under,
            # and neither meets a second copy of the other.
            dq = attend(block, Gradients(dq, None)).dq
            dq, arrived, block = jax.lax.optimization_barrier((dq, arrived, block))
            following_block = _hop(route, block) if following else None
            if arrived is None:
                dq, arrived = _nothing_yet(dq, block.kv)
            dkv = attend(block, Gradients(None, arrived)).dkv
            dkv, following_block = jax.lax.optimization_barrier((dkv, following_block))
            return following_block, Gradients(dq, dkv)
        following_block = _hop(route, block) if following else None
        if arrived is not None and not self.kernel.covers_hops:
            return following_block, attend(block, Gradients(dq, arrived))
        dq, nothing = _nothing_yet(dq, block.kv)
        dq, share = attend(block, Gradients(dq, nothing))
        return following_block, Gradients(dq, share if arrived is None else arrived + share)

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

        def attend(part: Partial, q_slots: Slots, k_slots: Slots) -> Partial:
            relation = self._relation(call, q_slots, rows.tokens, k_slots, block.tokens, positions)
            with jax.named_scope(KERNEL_SCOPE):
                return self.kernel.forward(rows.q, block.kv, relation, self.rule, rows.heads, part, q_slots, k_slots)

        return self._run(call, all_slots(rows.q.shape[3]), block, attend, part)

    def _backward(
        self, call: Call, q_slots: Slots, rows: "_Rows", block: Block, positions: jax.Array, gradients: Gradients
    ) -> Gradients:
        """Add what a call yields to the gradients of the queries and of the block."""

        def attend(gradients: Gradients, q_slots: Slots, k_slots: Slots) -> Gradients:
            relation = self._relation(call, q_slots, rows.tokens, k_slots, block.tokens, positions)
            of_rows = rows.lse, rows.delta, rows.dout
            with jax.named_scope(KERNEL_SCOPE):
                return self.kernel.backward(
                    rows.q, block.kv, relation, self.rule, rows.heads, *of_rows, gradients, q_slots, k_slots
                )

        return self._run(call, q_slots, block, attend, gradients)

    def _run(self, call: Call, q_slots: Slots, block: Block, attend: Callable[[T, Slots, Slots], T], state: T) -> T:
        """Apply `attend` to these queries and the whole block, or to one pair of chunks after another."""
        length = block.kv.shape[2]
        if call.chunks is None:
            return _if(call.when, lambda state: attend(state, q_slots, all_slots(length)), state)
        q_size, k_size = q_slots.size // self.layout.chunks, length // self.layout.chunks

        def step(state: T, pair: Chunks) -> T:
            q, k = Slots(pair.q * q_size, q_size, q_size), Slots(pair.k * k_size, k_size, k_size)
            return _if(pair.when, lambda state: attend(state, q, k), state)

        return loop(step, state, call.chunks)

    def _relation(
        self, call: Call, q_slots: Slots, q: Tokens, k_slots: Slots, k: Tokens, k_positions: jax.Array
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


def _nothing_yet(after: jax.Array, like: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`after`, and zeros like `like` that do not take memory before `after` is there.

    Compilers make zeros wherever they like, such as all those of a program at once at its beginning.
    """
    after, zero = jax.lax.optimization_barrier((after, filled(like, ())))
    return after, jnp.broadcast_to(zero, like.shape)


def _if(when: jax.Array | None, apply: Callable[[T], T], state: T) -> T:
    """`apply(state)` where `when` holds; None = always."""
    return apply(state) if when is None else jax.lax.cond(when, apply, lambda state: state, state)


class _Rows(NamedTuple):
    """What is known of the queries, grouped by the key/value head they share."""

    q: jax.Array  # [B, K, G, L, D]
    tokens: Tokens
    heads: Heads
    # In the backward pass only.
    dout: Any = None
    lse: Any = None
    delta: Any = None


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
