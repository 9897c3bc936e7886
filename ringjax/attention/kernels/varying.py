"""Which values differ between the devices of a mesh, where jax keeps track of it (`jax.shard_map`, check_vma)."""

from typing import Any

import jax


def varying_alike(arrays: Any) -> tuple[Any, Any]:
    """Arrays that vary over the same manual mesh axes, and these axes as a type for results."""
    kinds = [jax.typeof(x).manual_axis_type for x in jax.tree.leaves(arrays)]
    axes: frozenset[str] = frozenset().union(*(kind.varying for kind in kinds))

    def add(x: jax.Array) -> jax.Array:
        missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(add, arrays), jax.sharding.ManualAxisType(varying=axes)
