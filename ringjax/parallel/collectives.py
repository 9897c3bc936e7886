"""What a compiled program sends between devices, read from its text: which collectives, over which axes, how much.

XLA numbers the devices of a program in the order of its mesh, row by row, whatever their own ids are. So the groups
of an operation say by themselves over which axes it runs, and no device is needed to find out: programs that were
compiled for an accelerator that is not here are read just as well.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from math import ceil, prod
from typing import NamedTuple

import numpy as np

from ringjax.parallel.program_text import Program

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

_OPERATION = re.compile(rf"%\S+ = (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_LAYOUT = re.compile(r"\{[^{}]*\}")

_ROOT = re.compile(r"ROOT %\S+ = (\(.*?\)|\S+) ")

_PAIRS = re.compile(r"source_target_pairs=(\{.*?\}\}|\{\})")
_LISTED = re.compile(r"replica_groups=(\{\{.*?\}\}|\{\})")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESHED = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{(.*?)\}")
_ARRANGED = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXIS_SIZE = re.compile(r"'([^']*)'=(\d+)")
_AXIS_PART = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")

Groups = list[list[int]]  # places in the mesh that talk to each other


class Collective(NamedTuple):
    """One array that one collective operation yields on each device.

    Attributes:
      kind: one of `KINDS`; an operation in two halves, `-start` and `-done`, counts as one.
      axes: mesh axes over which it runs, in mesh order; () = each device by itself; None = its groups are those of
        no set of whole axes.
      dtype: as XLA writes it: f32, bf16, s32, pred.
      shape: of the result, on one device.
      times: how often each device runs it in one run of the program. Each branch of a conditional counts, as if
        all of them ran.
    """

    kind: str
    axes: tuple[str, ...] | None
    dtype: str
    shape: tuple[int, ...]
    times: int

    @property
    def bytes(self) -> int:
        """Size of the result on one device, all times together."""
        return self.times * ceil(prod(self.shape) * _bits(self.dtype) / 8)


def read_collectives(text: str, axis_sizes: Mapping[str, int]) -> list[Collective]:
    """Every collective of a program, in the order of its text.

    Args:
      text: `compiled.as_text()`.
      axis_sizes: of the mesh it was compiled for, in mesh order: `mesh.shape`.

    Raises:
      ValueError: a loop with collectives has no known number of trips.

    Example:
      >>> text = '''
      ... ENTRY %main (x: f32[4]) -> f32[8] {
      ...   ROOT %y = f32[8]{0} all-gather(%x), replica_groups={{0,2},{1,3}}, dimensions={0}
      ... }'''
      >>> read_collectives(text, {"data": 2, "seq": 2})
      [Collective(kind='all-gather', axes=('data',), dtype='f32', shape=(8,), times=1)]
    """
    program = Program.read(text)
    runs = program.runs(lambda line: bool(_OPERATION.search(line)))
    axes = cache(partial(_axes, axis_sizes=dict(axis_sizes)))
    found = []
    for name, lines in program.bodies.items():
        for line in lines:
            if runs[name] and (match := _OPERATION.search(line)):
                result, kind, started = match.groups()
                if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                    # On TPUs this is how a reduce-scatter is written: as a fusion of what it amounts to.
                    result, kind = _root_type(lines), "reduce-scatter"
                found += [
                    Collective(kind, axes(_groups_text(line)), dtype, shape, runs[name])
                    for dtype, shape in results(result, kind, bool(started))
                ]
    return found


def traffic(found: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...] | None], int]:
    """Bytes by kind and axes, in one run of the program, on one device."""
    total: Counter[tuple[str, tuple[str, ...] | None]] = Counter()
    for one in found:
        total[one.kind, one.axes] += one.bytes
    return dict(total)


def _root_type(lines: list[str]) -> str:
    """The type of what a computation yields."""
    return next(match[1] for match in map(_ROOT.search, lines) if match)


def results(result: str, kind: str, started: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Type and shape of each array that comes out of an operation, or will after its `-start`, from its own type."""
    plain = _LAYOUT.sub("", result)
    if started and plain.startswith("("):
        # (operands, results, what the device needs); only all-reduce-start has its results alone, unless wrapped.
        elements = _elements(plain)
        if kind != "all-reduce" or elements[0].startswith("("):
            plain = elements[1]
    return [(dtype, tuple(_integers(sizes))) for dtype, sizes in _ARRAY.findall(plain)]


def _elements(tuple_type: str) -> list[str]:
    """What a tuple type without layouts consists of."""
    elements, depth = [""], 0
    for char in tuple_type[1:-1]:
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += char
    return [re.sub(r"/\*.*?\*/", "", element).strip() for element in elements]


def _bits(dtype: str) -> int:
    """Of one element: the first number in the name of its type, as in f32, bf16, f8e4m3fn, s4."""
    match = re.search(r"\d+", dtype)
    return int(match[0]) if match else {"pred": 8, "token": 0}[dtype]


def _groups_text(line: str) -> str:
    """The part of an operation that says who talks to whom."""
    for pattern in (_PAIRS, _LISTED, _COUNTED, _MESHED):
        if match := pattern.search(line):
            return match[0]
    return ""


def _axes(text: str, axis_sizes: dict[str, int]) -> tuple[str, ...] | None:
    """The axes that the groups of an operation run over."""
    if pairs := _PAIRS.match(text):
        return _axes_of_pairs(_listed(pairs[1]), axis_sizes)
    readers: dict[re.Pattern[str], Callable[[re.Match[str]], Groups]] = {
        _LISTED: lambda match: _listed(match[1]),
        _COUNTED: lambda match: _arranged(match[2], match[3]).reshape(_integers(match[1])).tolist(),
        _MESHED: lambda match: _meshed(match[1], match[2], match[3]),
    }
    for pattern, read in readers.items():
        if match := pattern.match(text):
            return _axes_of_groups(read(match), axis_sizes)
    return None


def _listed(text: str) -> Groups:
    """{{0,1},{2,3}}"""
    return [_integers(group) for group in re.findall(r"\{([\d,]+)\}", text)]


def _arranged(sizes: str, order: str | None) -> np.ndarray:
    """0, 1, 2, ... in an array of these sizes, its dims then put in this order: [2,4]T(1,0)."""
    ids = np.arange(prod(_integers(sizes))).reshape(_integers(sizes))
    return ids.transpose(_integers(order)) if order else ids


def _meshed(axes: str, ids: str | None, grouped: str) -> Groups:
    """mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(2)2}: the mesh is XLA's own, with names of its own.

    (n)m is a part of an axis: m devices, where n such parts stand before it.
    """
    sizes = {name: int(size) for name, size in _AXIS_SIZE.findall(axes)}
    if ids is None:
        devices = np.arange(prod(sizes.values()))
    elif arranged := _ARRANGED.match(ids):
        devices = _arranged(arranged[1], arranged[2])
    else:
        devices = np.array(_integers(ids))
    place = np.indices(tuple(sizes.values()))
    for name, before, count in _AXIS_PART.findall(grouped):
        axis, size = list(sizes).index(name), sizes[name]
        count = int(count or size)
        step = size // (int(before or 1) * count)
        place[axis] -= place[axis] // step % count * step
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, key in zip(devices.flat, place.reshape(len(sizes), -1).T, strict=True):
        groups.setdefault(tuple(key), []).append(int(device))
    return list(groups.values())


def _axes_of_groups(groups: Groups, axis_sizes: dict[str, int]) -> tuple[str, ...] | None:
    """The axes whose devices each group consists of, all of them and no others."""
    shape = tuple(axis_sizes.values())
    groups = groups or [list(range(prod(shape)))]  # {}: one group of all
    moving = _moving(groups[:1], shape)
    if moving is None:
        return None
    ids = np.arange(prod(shape)).reshape(shape)
    whole = np.moveaxis(ids, moving, range(-len(moving), 0)).reshape(-1, prod(shape[axis] for axis in moving))
    if set(map(frozenset, groups)) != set(map(frozenset, whole.tolist())):
        return None
    return tuple(name for axis, name in enumerate(axis_sizes) if axis in moving)


def _axes_of_pairs(pairs: Groups, axis_sizes: dict[str, int]) -> tuple[str, ...] | None:
    """The axes along which messages travel: source and target of each differ along no other."""
    moving = _moving(pairs, tuple(axis_sizes.values()))
    return None if moving is None else tuple(name for axis, name in enumerate(axis_sizes) if axis in moving)


def _moving(groups: Groups, shape: tuple[int, ...]) -> list[int] | None:
    """The dims in which the places of some group differ; None if there is no such place in the mesh."""
    if any(place >= prod(shape) for group in groups for place in group):
        return None
    coordinates = [np.unravel_index(group, shape) for group in groups]
    return [axis for axis in range(len(shape)) if any(len(set(places[axis].tolist())) > 1 for places in coordinates)]


def _integers(text: str) -> list[int]:
    """4,2 -> [4, 2]"""
    return [int(number) for number in text.split(",") if number]
