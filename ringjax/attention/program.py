"""The operator's gradient, and its two laps over global arrays.

The custom gradient stands outside the two `shard_map` calls, one for the forward lap and one for the backward lap:
nothing is ever differentiated through a `shard_map`, which is what lets the operator live inside `vmap`, `scan`,
`jax.checkpoint` and pipelines. A caller who is inside a `shard_map` already runs the laps as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ringjax.attention.ring import Ring, Side

T = TypeVar("T")


@dataclass(frozen=True)
class Axes:
    """Mesh axes of the operator's dims."""

    seq: str
    batch: tuple[str, ...]
    head: str | None


@dataclass(frozen=True)
class LocalProgram:
    """A ring whose blocks are given: for use inside `shard_map`."""

    ring: Ring

    def forward(self, q, k, v, side: Side):
        return self.ring.forward(q, k, v, side)

    def backward(self, q, k, v, side: Side, out, lse, dout, dlse):
        return self.ring.backward(q, k, v, side, out, lse, dout, dlse)


@dataclass(frozen=True)
class GlobalProgram:
    """A ring on a mesh, over global arrays."""

    mesh: Mesh | AbstractMesh
    axes: Axes
    ring: Ring

    def forward(self, q, k, v, side: Side):
        full, heads, sides = self._specs(side)
        specs = (full, full, full, sides)
        lap = self._on_devices(self.ring.forward, side, specs, (full, heads))
        return lap(*self._place((q, k, v, side), specs))

    def backward(self, q, k, v, side: Side, out, lse, dout, dlse):
        full, heads, sides = self._specs(side)
        specs = (full, full, full, sides, full, heads, full, heads)
        lap = self._on_devices(self.ring.backward, side, specs, (full, full, full))
        return lap(*self._place((q, k, v, side, out, lse, dout, dlse), specs))

    def _on_devices(self, lap: Callable, side: Side, in_specs: Any, out_specs: Any) -> Callable:
        # jax checks which values differ between devices, but for two cases in which a caller's vmap would trip over
        # the check (seen with jax 0.10 to 0.12): a mesh with axes that the operator does not use, since vmap over one
        # (spmd_axis_name) forgets it where values are computed from the rank; and tokens as data, since a condition
        # that depends on them becomes a select of mixed kinds.
        used = {self.axes.seq, *self.axes.batch, self.axes.head}
        tokens = jax.tree.leaves((side.q_tokens, side.k_tokens))
        check = set(self.mesh.axis_names) <= used and not tokens and self.ring.kernel.check_vma
        return jax.shard_map(lap, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check)

    def _specs(self, side: Side) -> tuple[PartitionSpec, PartitionSpec, Side]:
        """Of arrays with heads and a head dim, of arrays with heads, and of what stands beside q, k and v."""
        batch = self.axes.batch or None
        rows = PartitionSpec(batch, self.axes.seq)
        heads = PartitionSpec(*rows, self.axes.head)
        sides = Side(
            jax.tree.map(lambda _: rows, side.q_tokens),
            jax.tree.map(lambda _: rows, side.k_tokens),
            jax.tree.map(lambda _: PartitionSpec(batch, self.axes.head), side.heads),
        )
        return PartitionSpec(*heads, None), heads, sides

    def _place(self, arrays: T, specs: Any) -> T:
        """Arrays, moved to where they are needed if the mesh leaves that to the program (Explicit axes)."""
        kinds = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        if AxisType.Explicit not in kinds.values():
            return arrays

        def move(x: jax.Array, spec: PartitionSpec) -> jax.Array:
            names = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
            explicit = [tuple(name for name in some if kinds[name] is AxisType.Explicit) for some in names]
            return jax.sharding.reshard(x, NamedSharding(self.mesh, PartitionSpec(*explicit)))

        return jax.tree.map(move, arrays, specs)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(program: LocalProgram | GlobalProgram, q, k, v, side: Side):
    """out and lse, differentiable in q, k and v."""
    return program.forward(q, k, v, side)


def _attention_fwd(program, q, k, v, side: Side):
    q, k, v = _differentiated_once((q, k, v))
    out, lse = program.forward(q, k, v, side)
    # Named, so that a rematerialisation policy can keep them and never replay a lap of the ring.
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (out, lse), (q, k, v, side, out, lse)


def _attention_bwd(program, residuals, cotangents):
    q, k, v, side, out, lse = residuals
    q, k, v, out, lse, cotangents = _differentiated_once((q, k, v, out, lse, cotangents))
    dq, dk, dv = program.backward(q, k, v, side, out, lse, *cotangents)
    return dq, dk, dv, None


@jax.custom_jvp
def _differentiated_once(arrays: Any) -> Any:
    return arrays


@_differentiated_once.defjvp
def _refuse_second_derivative(primals: tuple, tangents: tuple) -> tuple:
    raise NotImplementedError(
        "ring attention has a first derivative and no second one, and its gradient is differentiated here: take "
        "second derivatives with reference_attention, on one device"
    )


attention.defvjp(_attention_fwd, _attention_bwd)
compiled_attention = jax.jit(attention, static_argnums=0)
