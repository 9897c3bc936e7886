"""THE sharding table: where every dim of every tensor lives on the mesh.

Model code names logical dims. This table alone says which mesh axes they are spread over, once for tensors at rest
(parameters, optimizer state) and once for tensors in use (activations, and weights while a layer uses them). A ring
replicates weights unless told otherwise, so at rest the embed dim is spread over fsdp and seq together (ZeRO-3 over
the ring), and `gather` brings one layer's weights together when they are needed. Activations never move for that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


@dataclass(frozen=True)
class Axes:
    """Mesh axes of one logical dim, at rest and in use."""

    stored: tuple[str, ...] = ()
    used: tuple[str, ...] = ()


TABLE = {
    # Rows of a batch: in the layers, where each stage has its own, and before and behind them.
    "batch": Axes(used=("data", "fsdp")),
    "rows": Axes(used=("stage", "data", "fsdp")),
    "seq": Axes(used=("seq",)),
    "embed": Axes(stored=("fsdp", "seq")),
    "heads": Axes(stored=("tensor",), used=("tensor",)),
    "kv_heads": Axes(stored=("tensor",), used=("tensor",)),
    "head_dim": Axes(),
    "mlp": Axes(stored=("tensor",), used=("tensor",)),
    "vocab": Axes(stored=("tensor",), used=("tensor",)),
    # Layers are stacked as [rounds, layers of a round]: each stage has some of every round. See pipeline.py.
    "rounds": Axes(),
    "layers": Axes(stored=("stage",)),
    "stage": Axes(used=("stage",)),
}

STACKED = ("rounds", "layers")  # what a layer's weight has before its own dims

Dims = Sequence[str | None]  # one name for each dim of a tensor; None = a dim that is never spread


def stored(dims: Dims) -> PartitionSpec:
    """The spec of a tensor at rest.

    Args:
      dims: the logical name of each dim, or None.

    Raises:
      ValueError: a name is not in the table, or two dims would use one mesh axis.

    Example:
      >>> tuple(stored(("layers", "embed", "mlp")))
      ('stage', ('fsdp', 'seq'), 'tensor')
    """
    return _spec(dims, [_axes(dim).stored for dim in dims])


def used(dims: Dims) -> PartitionSpec:
    """The spec of a tensor in use: as `stored`, from the other column of the table.

    Example:
      >>> tuple(used(("batch", "seq", "embed")))
      (('data', 'fsdp'), 'seq', None)
    """
    return _spec(dims, [_axes(dim).used for dim in dims])


def constrain(x: jax.Array, *dims: str | None) -> jax.Array:
    """Hold an activation to its place on the mesh set with `jax.set_mesh`; without a mesh, return it as it is.

    Args:
      x: any array.
      dims: the logical name of each of its dims.

    Raises:
      ValueError: the names do not fit x or the table.
    """
    return _hold(x, dims, used(dims))


def gather(weight: jax.Array, *dims: str | None) -> jax.Array:
    """Bring a weight at rest together for use, on the mesh set with `jax.set_mesh`.

    Both places are named, so that the gradient travels the same way back: summed over the devices that used the
    weight and left in the pieces it is stored in.

    Args:
      weight: one layer's weight, already in the type in which it is used: half the bytes travel in bfloat16.
      dims: the logical name of each of its dims.
    """
    return _hold(_hold(weight, dims, stored(dims)), dims, used(dims))


def device_count(dim: str) -> int:
    """Pieces that a dim in use is cut into on the mesh set with `jax.set_mesh`; 1 without one."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    return math.prod(sizes.get(axis, 1) for axis in _axes(dim).used)


def activation_sharding(mesh: Mesh | AbstractMesh, *dims: str | None) -> NamedSharding:
    """The sharding of a tensor in use on a given mesh: what a batch is put on the devices with."""
    return NamedSharding(mesh, _restrict(used(dims), mesh))


def state_shardings(tree: Any, mesh: Mesh) -> Any:
    """The shardings at rest of parameters, optimizer state or a whole train state.

    Args:
      tree: any pytree. Flax variables carry their dims as metadata (`nnx.Param(value, dims=(...))`), and optax
        keeps them in its moments; every other leaf is small and replicated. Abstract values will do.
      mesh: where it shall live.

    Returns:
      The same tree with a `NamedSharding` in place of each array: fit for `out_shardings` and `jax.device_put`.

    Raises:
      ValueError: the size of a dim is not a multiple of the devices it is spread over.
    """

    def sharding(path: tuple, leaf: Any) -> Any:
        if not isinstance(leaf, nnx.Variable):
            return NamedSharding(mesh, PartitionSpec())
        dims = leaf.get_metadata("dims", (None,) * len(leaf.shape))
        spec = _restrict(stored(dims), mesh)
        _check_divides(jax.tree_util.keystr(path), leaf.shape, dims, spec, mesh)
        return leaf.replace(NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(sharding, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _hold(x: jax.Array, dims: Dims, spec: PartitionSpec) -> jax.Array:
    """Constrain x to the spec on the current mesh, if there is one."""
    if x.ndim != len(dims):
        raise ValueError(f"an array of shape {x.shape} needs {x.ndim} dim names, got {tuple(dims)}")
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, _restrict(spec, mesh))


def _axes(dim: str | None) -> Axes:
    """The table's row of one dim."""
    if dim is None:
        return Axes()
    if dim not in TABLE:
        raise ValueError(f"unknown dim {dim!r}; the dims are {', '.join(TABLE)}")
    return TABLE[dim]


def _spec(dims: Dims, axes: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """A spec from the axes of each dim; no axis twice."""
    taken: dict[str, str | None] = {}
    for dim, names in zip(dims, axes, strict=True):
        for name in names:
            if name in taken:
                raise ValueError(
                    f"dims {tuple(dims)}: {taken[name]!r} and {dim!r} are both spread over mesh axis {name!r}; "
                    f"name at most one of them"
                )
            taken[name] = dim
    return PartitionSpec(*map(_entry, axes))


def _entry(names: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """Axis names in the form in which PartitionSpec prints shortest."""
    if len(names) == 1:
        return names[0]
    return names or None


def _names(entry: Any) -> tuple[str, ...]:
    """The inverse of `_entry`."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _restrict(spec: PartitionSpec, mesh: Any) -> PartitionSpec:
    """The spec without the axes that somebody's own, smaller mesh lacks."""
    return PartitionSpec(*(_entry(tuple(n for n in _names(e) if n in mesh.axis_names)) for e in spec))


def _check_divides(name: str, shape: tuple[int, ...], dims: Dims, spec: PartitionSpec, mesh: Mesh) -> None:
    """Raise unless each dim can be cut evenly over its axes."""
    for size, dim, entry in zip(shape, dims, spec, strict=True):
        axes = _names(entry)
        pieces = 1
        for axis in axes:
            pieces *= mesh.shape[axis]
        if size % pieces:
            raise ValueError(
                f"parameter {name}: dim {dim!r} of size {size} is stored over mesh axes {', '.join(axes)} and must "
                f"be a multiple of their {pieces} devices; change the size or the mesh"
            )
