"""Reads the collectives out of a compiled program's text, and tells weights from activations."""

import re
from collections import Counter
from typing import NamedTuple

import jax
from flax import nnx
from jax.sharding import NamedSharding
from jax.stages import Compiled

from ringjax.parallel import used

_KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
_OPERATION = re.compile(rf"= (\(.*?\)|\S+) ({_KINDS})(?:-start)?\(")
_TYPED = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%([\w.\-]+)")
_SHAPE = re.compile(r"[a-z]\w*\[([\d,]*)\]")


class Collective(NamedTuple):
    """One array that one collective operation yields on each device."""

    kind: str
    shape: tuple[int, ...]


def collectives(compiled: Compiled) -> list[Collective]:
    """Every collective of a program; a loop's body counts once."""
    text = compiled.as_text()
    assert text
    found = []
    for result, kind in _OPERATION.findall(text):
        for sizes in _SHAPE.findall(result):
            found.append(Collective(kind, tuple(int(size) for size in sizes.split(",") if size)))
    return found


def shapes(compiled: Compiled, kind: str) -> list[tuple[int, ...]]:
    """What the collectives of one kind yield."""
    return [found.shape for found in collectives(compiled) if found.kind == kind]


def weights_in_use(params: nnx.State) -> set[tuple[int, ...]]:
    """Shapes of one layer's weights as a device uses them: what an all-gather may yield."""
    found = set()
    for param in jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        value, dims = param[...], param.get_metadata("dims")
        stacked = dims[0] == "layers"
        spec = used(dims[stacked:])
        found.add(NamedSharding(value.sharding.mesh, spec).shard_shape(value.shape[stacked:]))
    return found


def executed(compiled: Compiled) -> Counter[tuple[str, str, tuple[int, ...]]]:
    """How often each device runs each collective, as (kind, type, shape): a loop's body counts once per trip."""
    text = compiled.as_text()
    assert text
    computations: dict[str, list[str]] = {}
    entry = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            entry = match[2] if match[1] else entry
            body = computations.setdefault(match[2], [])
        elif line.startswith("  "):
            body.append(line)

    def count(name: str) -> Counter[tuple[str, str, tuple[int, ...]]]:
        total: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
        for line in computations[name]:
            if match := _OPERATION.search(line):
                for dtype, sizes in _TYPED.findall(match[1]):
                    total[(match[2], dtype, tuple(int(size) for size in sizes.split(",") if size))] += 1
            trips = _TRIPS.search(line)
            for called in _CALLED.findall(line):
                inner = count(called)
                if " while(" in line and inner:
                    assert trips, f"a loop with collectives has no known trip count: {line}"
                repeat = int(trips[1]) if trips else 1
                total.update({key: repeat * times for key, times in inner.items()})
        return total

    return count(entry)
