"""Reads the collectives out of a compiled program's text, and tells weights from activations."""

import re
from collections import Counter
from typing import NamedTuple

import jax
from flax import nnx
from jax.sharding import NamedSharding
from jax.stages import Compiled

from ringjax.parallel import STACKED, used

_KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
_OPERATION = re.compile(rf"= (\(.*?\)|\S+) ({_KINDS})(?:-start)?\(")
_TYPED = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


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
        found += [Collective(kind, shape) for _, shape in _arrays(result)]
    return found


def shapes(compiled: Compiled, kind: str) -> list[tuple[int, ...]]:
    """What the collectives of one kind yield."""
    return [found.shape for found in collectives(compiled) if found.kind == kind]


def weights_in_use(params: nnx.State) -> set[tuple[int, ...]]:
    """Shapes of one layer's weights as a device uses them: what an all-gather may yield."""
    found = set()
    for param in jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        value, dims = param[...], param.get_metadata("dims")
        stacked = len(STACKED) if dims[0] == STACKED[0] else 0
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
                for dtype, shape in _arrays(match[1]):
                    total[(match[2], dtype, shape)] += 1
            trips = _TRIPS.search(line)
            branches = [name.strip(" %") for names in _BRANCHES.findall(line) for name in names.split(",")]
            for called in _CALLED.findall(line) + branches:
                inner = count(called)
                if " while(" in line and inner:
                    assert trips, f"a loop with collectives has no known trip count: {line}"
                repeat = int(trips[1]) if trips else 1
                total.update({key: repeat * times for key, times in inner.items()})
        return total

    return count(entry)


def _arrays(result: str) -> list[tuple[str, tuple[int, ...]]]:
    """Type and shape of each array of an operation's result, as the text writes it."""
    return [(dtype, tuple(int(n) for n in sizes.split(",") if n)) for dtype, sizes in _TYPED.findall(result)]


def trips(compiled: Compiled) -> list[int]:
    """How often each loop of a program runs."""
    text = compiled.as_text()
    assert text
    return [int(count) for count in _TRIPS.findall(text)]
