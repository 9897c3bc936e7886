"""One attention problem, its float64 answer, and the same problem run through the ring."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from ringjax.attention import Mask, alibi_slopes, get_layout, reference_attention, ring_attention
from ringjax.attention.kernels import BlockKernel

RESULTS = ("out", "lse", "dq", "dk", "dv", "dsinks")


@dataclass(frozen=True)
class Problem:
    """Inputs in natural order, with cotangents for out and lse; `answer` is the float64 oracle's."""

    seq: int = 48
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    value_dim: int = 8
    batch: int = 2
    mask: Mask = Mask()  # noqa: RUF009 (frozen)
    packed: bool = False
    placed: str = ""  # positions as data: "shuffled", or "document" for those within each document
    softcap: float | None = None
    alibi: bool = False
    dropout: float = 0.0
    with_sinks: bool = False
    structured: bool = False
    dtype: str = "float32"

    @cached_property
    def segments(self) -> np.ndarray | None:
        """Documents of uneven lengths, other ones in each row, and padding in between and at the end."""
        if not self.packed:
            return None
        rng = np.random.default_rng(1)
        ids = np.sort(rng.integers(0, 5, (self.batch, self.seq)), axis=1).astype(np.int32)
        ids[:, -3:] = -1
        ids[0, 10:12] = -2
        return ids

    @cached_property
    def positions(self) -> np.ndarray | None:
        """What the tokens give as their positions."""
        if self.placed == "shuffled":
            rng = np.random.default_rng(2)
            return np.stack([rng.permutation(self.seq) for _ in range(self.batch)]).astype(np.int32)
        if self.placed == "document":
            assert self.segments is not None
            first = np.array([[np.argmax(row == one) for one in row] for row in self.segments])
            return (np.arange(self.seq) - first).astype(np.int32)
        return None

    @cached_property
    def sinks(self) -> np.ndarray | None:
        """A logit per head."""
        return np.linspace(-1, 2, self.heads, dtype=np.float32) if self.with_sinks else None

    @property
    def options(self) -> dict[str, Any]:
        """What ring and oracle are asked for alike, besides arrays of tokens."""
        options: dict[str, Any] = {"mask": self.mask, "softcap": self.softcap}
        if self.alibi:
            options["alibi_slopes"] = alibi_slopes(self.heads)
        if self.dropout:
            options |= {"dropout_rate": self.dropout, "dropout_seed": 3}
        return options

    @cached_property
    def inputs(self) -> tuple[np.ndarray, ...]:
        """q, k, v, dout, dlse."""
        rng = np.random.default_rng(0)
        shapes = [(self.heads, self.dim), (self.kv_heads, self.dim), (self.kv_heads, self.value_dim)]
        shapes += [(self.heads, self.value_dim), (self.heads,)]
        arrays = [rng.normal(size=(self.batch, self.seq, *shape)) for shape in shapes]
        if self.structured:
            # Ramps along the sequence, another scale in each row and head, scores far from 0: an error in one
            # block, row or head shows, where in noise it would average out.
            place = np.linspace(-1, 1, self.seq).reshape(1, -1, *[1] * 2)
            row = np.arange(1, self.batch + 1).reshape(-1, 1, 1, 1)
            q, k, v, dout = (x * 0.1 + place * row * (1 + np.arange(x.shape[2])[:, None]) for x in arrays[:4])
            # A quarter of the queries: at full size dq cancels so far that dense attention in float32 errs by 1e-5.
            arrays = [q / 4, k, v, dout, arrays[4]]
        if self.segments is not None:
            arrays[4] = arrays[4] * (self.segments >= 0)[..., None]  # the lse of padding is -inf: no cotangent
        return (*(x.astype(jnp.dtype(self.dtype)) for x in arrays[:4]), arrays[4].astype(np.float32))

    @cached_property
    def answer(self) -> dict[str, np.ndarray]:
        """The oracle's results in float64."""
        with jax.enable_x64():
            *inputs, dout, dlse = (jnp.asarray(x, jnp.float64) for x in self.inputs)
            sinks = () if self.sinks is None else (jnp.asarray(self.sinks, jnp.float64),)

            def attend(q, k, v, *sinks):
                more = {"sinks": sinks[0]} if sinks else {}
                tokens = {"segment_ids": self.segments, "positions": self.positions}
                return reference_attention(q, k, v, **tokens, **self.options, **more)

            results, pullback = jax.vjp(attend, *inputs, *sinks)
            return dict(zip(RESULTS, map(np.asarray, (*results, *pullback((dout, dlse)))), strict=False))

    def run(self, ring: int, layout: str, kernel: str | BlockKernel = "xla", **more: Any) -> dict[str, np.ndarray]:
        """The ring's results, back in natural order."""
        order = get_layout(layout)

        def permuted(x: np.ndarray | None) -> np.ndarray | None:
            return None if x is None else order.permute(x, ring)

        *inputs, dout, dlse = (order.permute(x, ring) for x in self.inputs)
        settings = {
            "mesh": ring_mesh(ring),
            "layout": layout,
            "segment_ids": permuted(self.segments),
            "positions": permuted(self.positions),
            "kernel": kernel,
            **self.options,
            **more,
        }
        sinks = () if self.sinks is None else (self.sinks,)

        def attend(q, k, v, *sinks):
            with_sinks = {"sinks": sinks[0]} if sinks else {}
            return ring_attention(q, k, v, **settings, **with_sinks, return_lse=True)

        @jax.jit
        def forward_and_backward(cotangents, *inputs):
            results, pullback = jax.vjp(attend, *inputs)
            return *results, *pullback(cotangents)

        rows = forward_and_backward((dout, dlse), *inputs, *sinks)
        found = {name: order.unpermute(np.asarray(x), ring) for name, x in zip(RESULTS[:5], rows, strict=False)}
        return found | ({"dsinks": np.asarray(rows[-1])} if sinks else {})

    def errors(self, results: dict[str, np.ndarray]) -> dict[str, float]:
        """Relative Frobenius errors; rows without keys must have lse -inf exactly."""
        assert results.keys() == self.answer.keys()
        lse = self.answer["lse"]
        np.testing.assert_array_equal(np.isneginf(results["lse"]), np.isneginf(lse))
        return {
            name: relative_error(
                np.where(np.isneginf(results[name]), 0, results[name]), np.where(np.isneginf(want), 0, want)
            )
            for name, want in self.answer.items()
        }


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """|got - want| / |want| in the Frobenius norm."""
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def ring_mesh(ring: int, **others: int) -> Mesh:
    """A mesh with a ring, and other axes before it."""
    sizes = {**others, "seq": ring}
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), devices=devices)


@pytest.fixture(scope="session")
def problem() -> type[Problem]:
    """The class itself: each test chooses its variant."""
    return Problem


@pytest.fixture(scope="session")
def mesh_of():
    """`ring_mesh`."""
    return ring_mesh
