"""The Pallas programs of the TPU kernel.

Scores stand with keys first, [keys, queries], here called [s, x]. What belongs to a query (maximum, sum, lse, delta,
position) is then one row of lanes, as it lies in memory; maxima and sums over keys run down the sublanes, where they
are plain vector operations; and of the operands of the seven products only tiles of k and v and the accumulators need
transposing, never scores.

The grid is (B, K, G / heads, visits) or, where gradients of keys are summed over queries, (B, K, visits, G / heads).
A visit is a pair of tiles; see `visits`. All query heads of a step share the tile of keys, and the mask.

As in the `xla` kernel a weight of 0 does not silence a value that is not finite: see `_tame`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringjax.attention.kernels.base import Gradients, Order
from ringjax.attention.kernels.tpu_visits import Cut, lead_by
from ringjax.attention.mask import Tokens, visible
from ringjax.attention.scores import Heads, ScoreRule, alibi_bias, keep
from ringjax.attention.softmax import Partial, finite_or_zero

LANES = 128
Arrays = dict[str, jax.Array]
Starts = tuple[jax.Array | int, jax.Array | int]
Refs = dict[str, Any]


class Scalars(NamedTuple):
    """What the scalar core reads: references inside the kernel."""

    stays: Any  # see Visits, [T]
    comes: Any  # [(B or 1) * T]
    starts: Any  # [2], the tiles of queries and of keys at which the slots of the call begin
    by: Any  # [1], how far queries are ahead of keys
    slopes: Any  # [B * K * G] of ALiBi
    noise: Any  # [B * K * G] of dropout, as int32


class Visit(NamedTuple):
    """One step of the grid."""

    b: jax.Array  # sequence
    head: jax.Array  # the first of its query heads, over sequences
    q_first: jax.Array  # slot of the first query
    k_first: jax.Array
    needed: jax.Array
    clear: jax.Array  # all of it is visible
    starts: jax.Array  # the first of the staying tile
    ends: jax.Array


class Seen(NamedTuple):
    """What a pair of tiles that is not all visible has to observe."""

    seen: jax.Array  # [s, x]
    broken_k: jax.Array  # [s, 1], NaN for keys with values that are not finite, else 0


@dataclass(frozen=True)
class Program:
    """Builds the kernels for blocks of one shape.

    Attributes:
      cut: the tiles, and what sees what.
      rule: what happens to scores.
      heads: query heads of a step.
      dim: D.
      vmem: see TpuKernel.
      interpret: see TpuKernel.
    """

    cut: Cut
    rule: ScoreRule
    heads: int
    dim: int
    vmem: int
    interpret: bool

    def forward(self, q: jax.Array, kv: jax.Array, heads: Heads, before: Partial, starts: Starts) -> Partial:
        """See BlockKernel.forward."""
        rows, dim = (self.heads, self.cut.tiles[0]), before.out.shape[-1]
        arrays = {"q": q, "kv": kv, "before_out": before.out, "before_lse": before.lse}
        scratch = [_scratch(rows[0], dim, rows[1]), _scratch(rows[0], 1, rows[1]), _scratch(rows[0], 1, rows[1])]
        results = self._call("forward", self._forward, arrays, heads, starts, before._asdict(), scratch)
        return Partial(results["out"], results["lse"])

    def backward(self, q, kv, heads: Heads, lse, delta, dout, before: Gradients, starts: Starts) -> Gradients:
        """See BlockKernel.backward."""
        arrays = {"q": q, "kv": kv, "lse": lse, "delta": delta, "dout": dout}
        scratch = [_scratch(self.heads, self.dim, self.cut.tiles[0])]
        dq, dkv = before
        if dq is not None:
            of_q = arrays | {"before_dq": dq}
            dq = self._call("dq", self._backward_queries, of_q, heads, starts, {"dq": dq}, scratch)["dq"]
        if dkv is not None:
            of_k = arrays | {"before_dkv": dkv}
            dkv = self._call("dkv", self._backward_keys, of_k, heads, starts, {"dkv": dkv}, [])["dkv"]
        return Gradients(dq, dkv)

    def _forward(self, visit: Visit, refs: Refs, out: Refs, acc, top, total) -> None:
        """One visit of a tile of queries. acc is [heads, Dv, x]: out, not yet divided by total, on its side."""

        @pl.when(visit.starts)
        def _start():
            for g in range(self.heads):
                lse = refs["before_lse"][g]
                top[g], total[g] = lse, jnp.where(jnp.isneginf(lse), 0.0, 1.0)
                acc[g] = refs["before_out"][g].T

        def attend(clear: bool):
            k, v, edge = self._keys(visit, refs, clear)
            k = self._key_rows(refs)  # what is broken in k shows in the scores, and goes no further
            v_t = v.T

            def attend_head(g):
                scores, _ = self._scores(visit, refs, g, _dot(k, refs["q"][g], 1, 1))
                if edge is not None:
                    scores = jnp.where(edge.seen, scores, -jnp.inf)
                new_top = jnp.maximum(top[g], scores.max(0, keepdims=True))
                shift = finite_or_zero(new_top)
                p = jnp.exp(scores - shift)
                if edge is not None:
                    _, broken_q = _tame(refs["q"][g])
                    p = jnp.where(edge.seen, p + edge.broken_k + _as_row(broken_q), 0.0)
                old = jnp.exp(top[g] - shift)
                kept = self._kept(visit, refs, g)
                weights = p if kept is None else p * kept
                total[g] = total[g] * old + p.sum(0, keepdims=True)
                acc[g] = acc[g] * old + _dot(v_t, weights.astype(v.dtype), 1, 0)
                top[g] = new_top

            _each(self.heads, attend_head, 1 if self.interpret else 2)

        self._when_needed(visit, attend)

        @pl.when(visit.ends)
        def _finish():
            for g in range(self.heads):
                none = total[g] == 0
                whole = jnp.where(none, 1.0, total[g])
                out["out"][g] = (acc[g] / whole).T
                out["lse"][g] = jnp.where(none, -jnp.inf, finite_or_zero(top[g]) + jnp.log(whole))

    def _backward_queries(self, visit: Visit, refs: Refs, out: Refs, acc) -> None:
        """One visit of a tile of queries. acc is [heads, D, x]: dq on its side."""

        @pl.when(visit.starts)
        def _start():
            for g in range(self.heads):
                acc[g] = refs["before_dq"][g].T

        def attend(clear: bool):
            k, _, edge = self._keys(visit, refs, clear)
            k_t = k.T

            def attend_head(g):
                broken_q = None if edge is None else _tame(refs["q"][g], refs["dout"][g])[1]
                _, ds = self._weights(visit, refs, g, edge, broken_q)
                acc[g] = acc[g] + _dot(k_t, ds, 1, 0)

            _each(self.heads, attend_head, 1 if self.interpret else 2)

        self._when_needed(visit, attend)

        @pl.when(visit.ends)
        def _finish():
            for g in range(self.heads):
                out["dq"][g] = acc[g].T

    def _backward_keys(self, visit: Visit, refs: Refs, out: Refs) -> None:
        """One visit of a tile of keys, whose gradients stay in the tiles of the results."""

        @pl.when(visit.starts)
        def _start():
            out["dkv"][...] = refs["before_dkv"][...]

        def attend(clear: bool):
            _, _, edge = self._keys(visit, refs, clear)

            def attend_head(g):
                q, dout = refs["q"][g], refs["dout"][g]
                broken_q = None
                if edge is not None:
                    # The rows of delta that are broken are broken in dout or in out, which is dout's fellow.
                    (q, dout), broken_q = _tame(q, dout, more=_as_column(refs["delta"][g]))
                weights, ds = self._weights(visit, refs, g, edge, broken_q)
                out["dkv"][:, : self.dim] += _dot(ds, q, 1, 0)
                out["dkv"][:, self.dim :] += _dot(weights, dout, 1, 0)

            _each(self.heads, attend_head, 1 if self.interpret else 2)

        self._when_needed(visit, attend)

    def _weights(
        self, visit: Visit, refs: Refs, g: jax.Array, edge: Seen | None, broken_q: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """What dout and q are multiplied by for dv and dk, both [s, x] in the inputs' dtype."""
        q, dout, lse, delta = (refs[name][g] for name in ("q", "dout", "lse", "delta"))
        scores, slope = self._scores(visit, refs, g, _dot(self._key_rows(refs), q, 1, 1))
        # Rows that see nothing have lse -inf: their weights are 0, as if it were +inf.
        excess = scores - jnp.where(jnp.isneginf(lse), jnp.inf, lse)
        # No score is above the lse it is part of, but for rounding. A comparison, since NaN has to pass.
        p = jnp.exp(jnp.where(excess > 0, 0.0, excess))
        if edge is not None:
            assert broken_q is not None
            p = jnp.where(edge.seen, p + edge.broken_k + _as_row(broken_q), 0.0)
        dp = _dot(self._value_rows(refs), dout, 1, 1)
        kept = self._kept(visit, refs, g)
        weights, dp = (p, dp) if kept is None else (p * kept, dp * kept)
        ds = p * (dp - delta) * self.rule.scale
        ds = ds if slope is None else ds * slope
        if edge is not None:
            # Products of large finite numbers overflow, and 0 times that would be NaN where nothing is seen.
            ds = jnp.where(edge.seen, ds, 0.0)
        return weights.astype(dout.dtype), ds.astype(q.dtype)

    def _key_rows(self, refs: Refs) -> jax.Array:
        return refs["kv"][:, : self.dim]

    def _value_rows(self, refs: Refs) -> jax.Array:
        return refs["kv"][:, self.dim :]

    def _keys(self, visit: Visit, refs: Refs, clear: bool) -> tuple[jax.Array, jax.Array, Seen | None]:
        """k and v, tame unless all is visible, and what has to be observed then."""
        k, v = self._key_rows(refs), self._value_rows(refs)
        if clear:
            return k, v, None
        (k, v), broken = _tame(k, v)
        return k, v, Seen(self._seen(visit, refs), broken)

    def _seen(self, visit: Visit, refs: Refs) -> jax.Array:
        """Which pairs of slots may see each other, [s, x]."""
        (q_len, k_len), (q_tile, k_tile) = self.cut.lengths, self.cut.tiles
        q_over, k_over = self.cut.overhang
        q_slots = visit.q_first + jax.lax.broadcasted_iota(jnp.int32, (1, q_tile), 1)
        k_slots = visit.k_first + jax.lax.broadcasted_iota(jnp.int32, (k_tile, 1), 0)
        q, k = self._tokens(refs)
        match self.cut.relation.order:
            case Order.ALL:
                q, k = q._replace(positions=None), k._replace(positions=None)
            case Order.SLOTS:
                stride = self.cut.relation.lead.stride
                q = q._replace(positions=stride * q_slots + refs["scalars"].by[0])
                k = k._replace(positions=stride * k_slots)
            case Order.ANY:
                pass
        seen = visible(self.cut.relation.mask, q, k)
        # Beyond its end a block has anything at all.
        for over, slots, length in ((q_over, q_slots, q_len), (k_over, k_slots, k_len)):
            if over:
                seen = slots < length if seen is None else seen & (slots < length)
        assert seen is not None, "everything is visible"
        return jnp.broadcast_to(seen, (k_tile, q_tile))

    def _scores(self, visit: Visit, refs: Refs, g: jax.Array, products: jax.Array) -> Any:
        """Scores, and the slope of the softcap there, None = 1."""
        scores, slope = self.rule.cap(products * self.rule.scale)
        if self.rule.alibi:
            q, k = (side.positions for side in self._tokens(refs))
            scores = scores + alibi_bias(refs["scalars"].slopes[visit.head + g], q, k)
        return scores, slope

    def _kept(self, visit: Visit, refs: Refs, g: jax.Array) -> jax.Array | None:
        """What dropout multiplies weights by."""
        rate = self.rule.dropout
        if not rate:
            return None
        q, k = (side.positions for side in self._tokens(refs))
        noise = refs["scalars"].noise[visit.head + g].astype(jnp.uint32)
        return jnp.where(keep(noise, q, k, rate), jnp.float32(1 / (1 - rate)), 0.0)

    def _tokens(self, refs: Refs) -> tuple[Any, Any]:
        """Tokens of queries [1, x] and of keys [s, 1]."""
        q, k = (
            Tokens(*(refs[f"{side}_{name}"][...] if f"{side}_{name}" in refs else None for name in Tokens._fields))
            for side in "qk"
        )
        return q, jax.tree.map(_as_column, k)

    def _when_needed(self, visit: Visit, attend: Callable[[bool], None]) -> None:
        """`attend(clear)`, for pairs that are all visible and for others."""
        some_clear, some_edge = self.cut.kinds
        if some_clear:
            pl.when(visit.needed & visit.clear if some_edge else visit.needed)(partial(attend, True))
        if some_edge:
            pl.when(visit.needed & ~visit.clear if some_clear else visit.needed)(partial(attend, False))

    def _call(
        self,
        name: str,
        body: Callable[..., None],
        arrays: Arrays,
        heads: Heads,
        starts: Starts,
        outs: Arrays,
        scratch: list,
    ) -> Arrays:
        """Run a body over the grid. The result "x", like `outs["x"]`, takes the place of the array "before_x".

        Each of its tiles is read before it is written.
        """
        q, keys_stay = arrays["q"], name == "dkv"
        batch, kv_heads, group = q.shape[:3]
        visits = self.cut.visits(keys_stay)
        count = visits.stays.shape[0]
        places = _Places(self, visits.comes.shape[0], count, group // self.heads, keys_stay)
        noise = None if heads.noise is None else heads.noise.astype(jnp.int32).reshape(-1)
        nothing = jnp.zeros(1, jnp.int32)
        scalars = Scalars(
            jnp.asarray(visits.stays),
            visits.comes.reshape(-1),
            jnp.stack([jnp.asarray(start, jnp.int32) for start in starts]),
            jnp.asarray(lead_by(self.cut.relation), jnp.int32).reshape(1),
            nothing if heads.slopes is None else heads.slopes.reshape(-1),
            nothing if noise is None else noise,
        )
        arrays = dict(arrays)
        for side, tokens in (("q", self.cut.relation.q_tokens), ("k", self.cut.relation.k_tokens)):
            for field, x in tokens._asdict().items():
                if x is not None:
                    arrays[f"{side}_{field}"] = x[:, None]
        shapes = {key: x.shape for key, x in outs.items()}
        rows = ("before_lse", "lse", "delta")
        arrays |= {key: arrays[key][:, :, :, None] for key in rows if key in arrays}
        laid = {key: (*x[:-1], 1, x[-1]) if key == "lse" else x for key, x in shapes.items()}
        kind = jax.typeof(q).manual_axis_type
        out_shape = {key: jax.ShapeDtypeStruct(x, jnp.float32, manual_axis_type=kind) for key, x in laid.items()}
        names = sorted(arrays)

        def kernel(*refs):
            some, (ins, out, *rest) = refs[: len(Scalars._fields)], refs[len(Scalars._fields) :]
            scalars = Scalars(*some)
            body(places.visit(scalars), {**ins, "scalars": scalars}, out, *rest)

        grid = (batch, kv_heads, count, group // self.heads) if keys_stay else (
            batch, kv_heads, group // self.heads, count
        )  # fmt: skip
        parallel = 2 if keys_stay else 3
        call = pl.pallas_call(
            kernel,
            out_shape=out_shape,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(Scalars._fields),
                grid=grid,
                in_specs=[{key: places.spec(key, arrays[key].shape) for key in names}],
                out_specs={key: places.spec(key, shape.shape) for key, shape in out_shape.items()},
                scratch_shapes=scratch,
            ),
            input_output_aliases={
                len(Scalars._fields) + names.index(f"before_{name}"): at for at, name in enumerate(sorted(out_shape))
            },
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel",) * parallel + ("arbitrary",) * (4 - parallel),
                vmem_limit_bytes=self.vmem,
            ),
            interpret=self.interpret,
            name=f"attention_{name}",
        )
        results = call(*scalars, arrays)
        return {key: x.reshape(shapes[key]) for key, x in results.items()}


@dataclass(frozen=True)
class _Places:
    """Where a step of the grid finds its tiles."""

    program: Program
    tables: int  # B, or 1 if all sequences share one
    count: int  # visits
    steps: int  # G / heads
    keys_stay: bool

    def visit(self, scalars: Scalars) -> Visit:
        """This step."""
        b, head, *last = (pl.program_id(axis) for axis in range(4))
        t, n = last if self.keys_stay else last[::-1]
        code, stays = scalars.comes[self._entry(b, t)], scalars.stays
        starts = (t == 0) | (stays[jnp.maximum(t - 1, 0)] != stays[t])
        ends = (t == self.count - 1) | (stays[jnp.minimum(t + 1, self.count - 1)] != stays[t])
        if self.keys_stay:
            starts, ends = starts & (n == 0), ends & (n == self.steps - 1)
        tile = {self.keys_stay: stays[t], not self.keys_stay: code >> 2}
        q_tile, k_tile = self.program.cut.tiles
        first_head = ((b * pl.num_programs(1) + head) * self.steps + n) * self.program.heads
        return Visit(
            b, first_head, tile[False] * q_tile, tile[True] * k_tile, code & 1 == 1, code & 2 == 2, starts, ends
        )

    def spec(self, name: str, shape: tuple[int, ...]) -> pl.BlockSpec:
        """The tile of an array, by its name."""
        q_tile, k_tile = self.program.cut.tiles
        match name:
            case "kv" | "before_dkv" | "dkv":
                return pl.BlockSpec((None, None, k_tile, shape[-1]), self._index("bhK0"))
            case "q_positions" | "q_segments":
                return pl.BlockSpec((None, 1, q_tile), self._index("b0q" if shape[0] > 1 else "00q"))
            case "k_positions" | "k_segments":
                return pl.BlockSpec((None, 1, k_tile), self._index("b0k" if shape[0] > 1 else "00k"))
            case "before_lse" | "lse" | "delta":
                return pl.BlockSpec((None, None, self.program.heads, 1, q_tile), self._index("bhn0Q"))
        return pl.BlockSpec((None, None, self.program.heads, q_tile, shape[-1]), self._index("bhnQ0"))

    def _index(self, dims: str) -> Callable[..., tuple]:
        """An index map, a letter for each dim.

        They are b, h, n as in the grid; q or k the tile among those of the call's slots, Q or K among the block's; 0
        the only one.
        """

        def index(b, head, *rest):
            t, n = rest[:2] if self.keys_stay else rest[1::-1]
            scalars = Scalars(*rest[2:])
            code = scalars.comes[self._entry(b, t)]
            tile = {self.keys_stay: scalars.stays[t], not self.keys_stay: code >> 2}
            if self.keys_stay:  # where nothing is needed, nothing is fetched
                n = jnp.where(code & 1 == 1, n, self.steps - 1)
            q, k = tile[False], tile[True]
            found = {"b": b, "h": head, "n": n, "q": q, "k": k, "0": 0}
            found |= {"Q": scalars.starts[0] + q, "K": scalars.starts[1] + k}
            return tuple(found[letter] for letter in dims)

        return index

    def _entry(self, b, t):
        return b * self.count + t if self.tables > 1 else t


def _each(count: int, step: Callable[[Any], None], abreast: int = 2) -> None:
    """step(0), ..., step(count - 1). Some stand side by side, so that a core can keep all its units busy."""
    abreast = abreast if count % abreast == 0 else 1

    def some(i: Any, _: None) -> None:
        for part in range(abreast):
            step(i * abreast + part)

    if count == abreast:
        some(0, None)
    else:
        jax.lax.fori_loop(0, count // abreast, some, None)


def _scratch(*shape: int) -> Any:
    return pltpu.VMEM(shape, jnp.float32)


def _dot(a: jax.Array, b: jax.Array, a_dim: int, b_dim: int) -> jax.Array:
    """The product of two matrices over these dims, in float32."""
    # TPUs would otherwise round float32 operands to bfloat16.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        a, b, (((a_dim,), (b_dim,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _tame(*arrays: jax.Array, more: jax.Array | None = None) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Arrays [n, ...] with rows of 0 for those with a value that is not finite, and [n, 1] NaN there, else 0.

    0 * NaN is NaN: such tokens enter the products as zeros, and those who see them get NaN for a weight instead.
    """
    broken = 0.0 if more is None else more * 0
    for x in arrays:
        broken = broken + (x.astype(jnp.float32) * 0).sum(-1, keepdims=True)
    fine = broken == 0  # type: ignore[operator]
    return tuple(jnp.where(fine, x, jnp.zeros((), x.dtype)) for x in arrays), broken  # type: ignore[return-value]


def _as_row(column: jax.Array) -> jax.Array:
    """[n, 1] -> [1, n]"""
    return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


def _as_column(row: jax.Array) -> jax.Array:
    """[1, n] -> [n, 1]"""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]
