"""What one program of a GPU kernel does: its tile of queries over tiles of keys, or its tile of keys over queries.

The algorithm is that of FlashAttention-2 (arXiv:2307.08691). Exponentials are taken to the base 2, which is what the
hardware has. Letters as in `tiles`: x the queries of a tile, s the keys of a tile. Which sequence and key/value head
a program works on is decided by the blocks it is given.

As in `xla`, what is not finite stays with those who may see it: in an edge, tokens of the side that is walked over,
over which the products sum, enter them as zeros if they have such values, and weights of theirs that are seen become
NaN instead. A token of the program's own tile has a row of its own in all products, and cannot harm others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ringjax.attention.kernels.gpu_visits import Extent, Visits, width_of
from ringjax.attention.mask import Mask, Tokens, visible
from ringjax.attention.scores import Heads, ScoreRule, alibi_bias, keep
from ringjax.attention.softmax import finite_or_zero

T = TypeVar("T")
Ref = Any  # of Pallas
Refs = tuple[Ref, ...]

Columns = tuple[int, int]  # the first, and how many

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Case:
    """What is known when a kernel is built.

    Attributes:
      mask: what positions are compared by; full if they hide nothing.
      stride: of positions between slots, where they follow from the slots.
      rule: what happens to scores.
      q: queries of the block, and of a tile.
      k: keys, likewise.
      dim: D.
      value_dim: Dv.
      group: G.
      edges: whether there may be pairs of tiles in which something is hidden.
      keys_first: whether scores are [s, x] and not [x, s].
    """

    mask: Mask
    stride: int
    rule: ScoreRule
    q: Extent
    k: Extent
    dim: int
    value_dim: int
    group: int
    edges: bool
    keys_first: bool

    @property
    def plain(self) -> bool:
        """Whether nothing but the scale acts on the products: it is then left to the exponential."""
        return self.rule.scale > 0 and self.rule.softcap is None and not self.rule.alibi

    @property
    def unit(self) -> float:
        """What scores are counted in, to the base 2."""
        return LOG2_E * (self.rule.scale if self.plain else 1.0)

    @property
    def keys(self) -> Columns:
        """Where keys stand beside values: first column and number of columns."""
        return 0, self.dim

    @property
    def values(self) -> Columns:
        return self.dim, self.value_dim

    def along_q(self, x: jax.Array) -> jax.Array:
        """One value per query, to broadcast against scores."""
        return x[None, :] if self.keys_first else x[:, None]

    def along_k(self, s: jax.Array) -> jax.Array:
        """One value per key, to broadcast against scores."""
        return s[:, None] if self.keys_first else s[None, :]


class Sight(NamedTuple):
    """References to what decides which pairs count, and how.

    Attributes:
      visits: of this program's tile.
      q_tokens: [Lq]
      k_tokens: [Lk]
      numbers: [3], `by` of the lead and the first slots of queries and of keys.
      heads: [G]
    """

    visits: Visits
    q_tokens: Tokens
    k_tokens: Tokens
    numbers: Ref
    heads: Heads

    @property
    def by(self) -> jax.Array:
        return self.numbers[0]

    @property
    def q_first(self) -> jax.Array:
        return self.numbers[1]

    @property
    def k_first(self) -> jax.Array:
        return self.numbers[2]


class Side(NamedTuple):
    """Queries or keys of a tile.

    Attributes:
      slots: their numbers.
      compared: what masks see of them.
      positions: what bias and dropout depend on.
    """

    slots: jax.Array
    compared: Tokens
    positions: jax.Array | None


class Rows(NamedTuple):
    """A tile.

    Attributes:
      start: its first slot among those of the call.
      extent: of the call.
      first: slot of the block at which those of the call begin.
    """

    start: jax.Array
    extent: Extent
    first: jax.Array | int


def forward(case: Case, sight: Sight, before: Refs, of_q: Refs, of_k: Refs, results: Refs) -> None:
    """out [G, Lq, Dv] and lse [G, Lq] of a tile of queries, from those before, q, and k with v."""
    (out_ref, lse_ref), (q_ref,), (kv_ref,) = before, of_q, of_k
    i, g = pl.program_id(0), pl.program_id(1)
    rows = Rows(i * case.q.tile, case.q, sight.q_first)
    q = _load(q_ref, (g,), rows, (0, case.dim))
    side = _side(case, sight.q_tokens, rows, sight.by)
    slope, noise = (None if x is None else x[g] for x in sight.heads)

    def attend(state: tuple, j: jax.Array, edge: bool) -> tuple:
        out, top, total = state
        there = Rows(j * case.k.tile, case.k, sight.k_first)
        k, v = _load(kv_ref, (), there, case.keys), _load(kv_ref, (), there, case.values)
        (k, v), broken = _tame(k, v) if edge else ((k, v), None)
        other = _side(case, sight.k_tokens, there)
        scores, _ = _scores(case, _dot(q, k, 1, 1), slope, side, other)
        seen = _seen(case, side, other) if edge else None
        scores = scores if seen is None else jnp.where(seen, scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(1) * case.unit)
        shift = finite_or_zero(new_top)
        p = jnp.exp2(scores * case.unit - shift[:, None])
        p = p if seen is None else jnp.where(seen, _added(p, broken), 0.0)
        old = jnp.exp2(top - shift)
        weights = p if noise is None else p * _kept(case, noise, side, other)
        out = out * old[:, None] + _dot(weights.astype(v.dtype), v, 1, 0)
        return out, new_top, total * old + p.sum(1)

    out_before = _load(out_ref, (g,), rows, (0, case.value_dim))
    lse_before = _load(lse_ref, (g,), rows)
    # Rows that have seen keys start with their lse as the maximum, to which they add up to 1.
    total = jnp.where(lse_before == -jnp.inf, 0.0, 1.0)
    sum_, top, total = _walk(case, sight.visits, case.k, attend, (out_before, lse_before * LOG2_E, total))
    _store(results[0], (g,), rows, sum_ / jnp.where(total == 0, 1.0, total)[:, None], (0, case.value_dim))
    _store(results[1], (g,), rows, (finite_or_zero(top) + jnp.log2(total)) / LOG2_E)


def backward_q(case: Case, sight: Sight, before: Refs, of_q: Refs, of_k: Refs, results: Refs) -> None:
    """dq [G, Lq, D] of a tile of queries, from dq before; q, dout, lse and delta; k with v."""
    (kv_ref,) = of_k
    i, g = pl.program_id(0), pl.program_id(1)
    rows = Rows(i * case.q.tile, case.q, sight.q_first)
    (q, dout), lse, delta = _rows(case, of_q, g, rows)
    side = _side(case, sight.q_tokens, rows, sight.by)
    slope, noise = (None if x is None else x[g] for x in sight.heads)

    def attend(state: tuple, j: jax.Array, edge: bool) -> tuple:
        there = Rows(j * case.k.tile, case.k, sight.k_first)
        k, v = _load(kv_ref, (), there, case.keys), _load(kv_ref, (), there, case.values)
        (k, v), broken = _tame(k, v) if edge else ((k, v), None)
        other = _side(case, sight.k_tokens, there)
        scores, steep = _scores(case, _dot(q, k, 1, 1), slope, side, other)
        seen = _seen(case, side, other) if edge else None
        p = _weights(case, scores, lse)
        p = p if seen is None else jnp.where(seen, _added(p, broken), 0.0)
        dp = _dot(dout, v, 1, 1)
        dp = dp if noise is None else dp * _kept(case, noise, side, other)
        ds = _ds(case, p, dp, delta, steep, seen)
        return (state[0] + _dot(ds.astype(k.dtype), k, 1, 0),)

    (dq,) = _walk(case, sight.visits, case.k, attend, (_load(before[0], (g,), rows, (0, case.dim)),))
    _store(results[0], (g,), rows, dq, (0, case.dim))


def backward_kv(case: Case, sight: Sight, before: Refs, of_q: Refs, of_k: Refs, results: Refs) -> None:
    """dk with dv [Lk, D + Dv] of a tile of keys, over the G heads that share it, from those before and as for dq."""
    (kv_ref,), (before_ref,), (result,) = of_k, before, results
    rows = Rows(pl.program_id(0) * case.k.tile, case.k, sight.k_first)
    k, v = _load(kv_ref, (), rows, case.keys), _load(kv_ref, (), rows, case.values)
    side = _side(case, sight.k_tokens, rows)

    def of_head(g: jax.Array, state: tuple) -> tuple:
        slope, noise = (None if x is None else x[g] for x in sight.heads)

        def attend(state: tuple, i: jax.Array, edge: bool) -> tuple:
            dk, dv = state
            there = Rows(i * case.q.tile, case.q, sight.q_first)
            (q, dout), lse, delta = _rows(case, of_q, g, there)
            if edge:
                (q, dout), broken = _tame(q, dout)
                lse = lse + broken
            other = _side(case, sight.q_tokens, there, sight.by)
            scores, steep = _scores(case, _dot(k, q, 1, 1), slope, other, side)
            seen = _seen(case, other, side) if edge else None
            p = _weights(case, scores, lse)
            p = p if seen is None else jnp.where(seen, p, 0.0)
            kept = None if noise is None else _kept(case, noise, other, side)
            weights, dp = p, _dot(v, dout, 1, 1)
            if kept is not None:
                weights, dp = p * kept, dp * kept
            dv = dv + _dot(weights.astype(dout.dtype), dout, 1, 0)
            ds = _ds(case, p, dp, delta, steep, seen)
            return dk + _dot(ds.astype(q.dtype), q, 1, 0), dv

        return _walk(case, sight.visits, case.q, attend, state)

    state = _load(before_ref, (), rows, case.keys), _load(before_ref, (), rows, case.values)
    dk, dv = jax.lax.fori_loop(0, case.group, of_head, state) if case.group > 1 else of_head(jnp.int32(0), state)
    _store(result, (), rows, dk, case.keys)
    _store(result, (), rows, dv, case.values)


def _walk(case: Case, visits: Visits, other: Extent, attend: Callable[[T, Any, bool], T], state: T) -> T:
    """Apply `attend(state, tile, edge)` to the tiles on this program's way: first the clear ones, then the edges."""
    if not case.edges:
        return jax.lax.fori_loop(0, other.tiles, lambda n, state: attend(state, n, False), state)
    first, clear, rest, end = (visits.bounds[n] for n in range(4))

    def tile(place: jax.Array) -> jax.Array:
        return place if visits.order is None else visits.order[place]

    def edge(n: jax.Array, state: T) -> T:
        place = first + n + jnp.where(n < clear - first, 0, rest - clear)
        return attend(state, tile(place), True)

    state = jax.lax.fori_loop(clear, rest, lambda n, state: attend(state, tile(n), False), state)
    return jax.lax.fori_loop(0, (clear - first) + (end - rest), edge, state)


def _side(case: Case, tokens: Tokens, rows: Rows, by: Any = 0) -> Side:
    slots, own = rows.start + jnp.arange(rows.extent.tile, dtype=jnp.int32), rows._replace(first=0)
    positions = None if tokens.positions is None else _load(tokens.positions, (), own)
    segments = None if tokens.segments is None else _load(tokens.segments, (), own, other=-1)
    compared = positions
    if case.mask.is_full:
        compared = None
    elif positions is None:
        compared = case.stride * slots + by
    return Side(slots, Tokens(compared, segments), positions)


def _seen(case: Case, q: Side, k: Side) -> jax.Array:
    """Which scores of an edge count."""
    of_q, of_k = jax.tree.map(case.along_q, q.compared), jax.tree.map(case.along_k, k.compared)
    seen = visible(case.mask, of_q, of_k)
    if case.k.length % case.k.tile:
        there = case.along_k(k.slots < case.k.length)
        seen = there if seen is None else seen & there
    assert seen is not None, "an edge of which nothing is hidden"
    shape = (case.k.tile, case.q.tile) if case.keys_first else (case.q.tile, case.k.tile)
    return jnp.broadcast_to(seen, shape)


def _scores(case: Case, products: jax.Array, slope: Any, q: Side, k: Side) -> tuple[jax.Array, jax.Array | None]:
    """Scores in `case.unit` from the products of queries and keys, and the slope of the softcap there, None = 1."""
    if case.plain:
        return products, None
    scores, steep = case.rule.cap(products * case.rule.scale)
    if slope is None:
        return scores, steep
    return scores + alibi_bias(slope, case.along_q(q.positions), case.along_k(k.positions)), steep  # type: ignore[arg-type]


def _kept(case: Case, noise: Any, q: Side, k: Side) -> jax.Array:
    """What weights are multiplied by."""
    rate = case.rule.dropout
    kept = keep(noise, case.along_q(q.positions), case.along_k(k.positions), rate)  # type: ignore[arg-type]
    return jnp.where(kept, jnp.float32(1 / (1 - rate)), jnp.float32(0))


def _weights(case: Case, scores: jax.Array, lse: jax.Array) -> jax.Array:
    """exp(s - lse), from the lse to the base 2."""
    exponent = scores * case.unit - case.along_q(lse)
    # No score is above the lse it is part of, but for rounding, which matters if scores are large. (A minimum would
    # lose NaN on the GPU.)
    return jnp.exp2(jnp.where(exponent > 0, 0.0, exponent))


def _ds(case: Case, p: jax.Array, dp: jax.Array, delta: jax.Array, steep: Any, seen: Any) -> jax.Array:
    """Gradient of the products; delta comes multiplied by the scale."""
    ds = p * (dp * case.rule.scale - case.along_q(delta))
    ds = ds if steep is None else ds * steep
    # Products of large finite numbers overflow, and 0 times that would be NaN where nothing is seen.
    return ds if seen is None else jnp.where(seen, ds, 0.0)


def _rows(case: Case, refs: Refs, g: Any, rows: Rows) -> tuple[tuple, jax.Array, jax.Array]:
    """q and dout of a tile, its lse to the base 2 and its delta times the scale."""
    q_ref, dout_ref, lse_ref, delta_ref = refs
    q, dout = _load(q_ref, (g,), rows, (0, case.dim)), _load(dout_ref, (g,), rows, (0, case.value_dim))
    # Rows that see nothing, and rows that are not there, get lse +inf: their probabilities are 0.
    lse = _load(lse_ref, (g,), rows, other=jnp.inf) * LOG2_E
    delta = _load(delta_ref, (g,), rows) * case.rule.scale
    return (q, dout), jnp.where(lse == -jnp.inf, jnp.inf, lse), delta


def _tame(*arrays: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Tokens of [t, ...] with zeros for those that have a value that is not finite in one of the arrays.

    Also what to add to weights, [t]: NaN for these tokens, otherwise 0.
    """
    broken = jnp.zeros(arrays[0].shape[0], jnp.float32)
    for x in arrays:
        broken += jnp.where(jnp.isfinite(x.astype(jnp.float32)), 0.0, jnp.nan).sum(1)
    fine = (broken == 0)[:, None]
    return tuple(jnp.where(fine, x, jnp.zeros((), x.dtype)) for x in arrays), broken


def _added(p: jax.Array, broken: jax.Array | None) -> jax.Array:
    """Weights with NaN in the columns of keys that are broken."""
    return p if broken is None else p + broken[None, :]


def _load(ref: Ref, index: tuple, rows: Rows, columns: Columns | None = None, other: float = 0) -> jax.Array:
    """Rows of a reference [*index, L], or of some columns of [*index, L, width], filled up with `other`."""
    view, mask = _view(ref, index, rows, columns)
    return triton.load(view) if mask is None else triton.load(view, mask=mask, other=other)


def _store(ref: Ref, index: tuple, rows: Rows, x: jax.Array, columns: Columns | None = None) -> None:
    view, mask = _view(ref, index, rows, columns)
    triton.store(view, x.astype(ref.dtype), mask=mask)


def _view(ref: Ref, index: tuple, rows: Rows, columns: Columns | None) -> tuple[Ref, jax.Array | None]:
    """These rows of a reference, and which of it exists, None = all."""
    slots, mask = pl.ds(rows.first + rows.start, rows.extent.tile), None
    if rows.extent.over:
        mask = rows.start + jnp.arange(rows.extent.tile, dtype=jnp.int32) < rows.extent.length
    if columns is None:
        return ref.at[(*index, slots)], mask
    (first, count), full, mask = columns, width_of(columns[1]), None if mask is None else mask[:, None]
    if count != full:
        there = (jnp.arange(full, dtype=jnp.int32) < count)[None, :]
        mask = there if mask is None else mask & there
    mask = None if mask is None else jnp.broadcast_to(mask, (rows.extent.tile, full))
    return ref.at[(*index, slots, pl.ds(first, full))], mask


def _dot(a: jax.Array, b: jax.Array, over_a: int, over_b: int) -> jax.Array:
    """Product of two matrices over one dim of each, accumulated in float32."""
    # The default would round float32 operands to 10 bits (TF32).
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((over_a,), (over_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
