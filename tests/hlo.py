"""Reads the collectives out of a compiled program's text."""

import re
from typing import NamedTuple

from jax.stages import Compiled

_KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
_OPERATION = re.compile(rf"= (\(.*?\)|\S+) ({_KINDS})(?:-start)?\(")
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
