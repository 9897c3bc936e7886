"""Short questions to a compiled program about its collectives; tells weights from activations."""

from collections import Counter

import jax
from flax import nnx
from jax.sharding import NamedSharding
from jax.stages import Compiled

from ringjax.parallel import STACKED, Collective, loop_trips, read_collectives, used


def collectives(compiled: Compiled, **axis_sizes: int) -> list[Collective]:
    """Every collective of a program; their axes are known if those of the mesh are given."""
    return read_collectives(_text(compiled), axis_sizes)


def shapes(compiled: Compiled, kind: str) -> list[tuple[int, ...]]:
    """What the collectives of one kind yield."""
    return [found.shape for found in collectives(compiled) if found.kind == kind]


def executed(compiled: Compiled) -> Counter[tuple[str, str, tuple[int, ...]]]:
    """How often each device runs each collective, as (kind, type, shape)."""
    total: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    for found in collectives(compiled):
        total[found.kind, found.dtype, found.shape] += found.times
    return total


def trips(compiled: Compiled) -> list[int]:
    """How often each loop of a program runs."""
    return loop_trips(_text(compiled))


def weights_in_use(params: nnx.State) -> set[tuple[int, ...]]:
    """Shapes of one layer's weights as a device uses them: what an all-gather may yield."""
    found = set()
    for param in jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        value, dims = param[...], param.get_metadata("dims")
        stacked = len(STACKED) if dims[0] == STACKED[0] else 0
        spec = used(dims[stacked:])
        found.add(NamedSharding(value.sharding.mesh, spec).shard_shape(value.shape[stacked:]))
    return found


def _text(compiled: Compiled) -> str:
    text = compiled.as_text()
    assert text
    return text
