"""Whether the hops of the ring run under attention kernels, read from a scheduled program's text.

An accelerator's transfer has two halves, a start and a done, and the schedule says what the device does in between. A
hop is covered if that is, or holds, the work of a block of attention.
"""

import re
from typing import NamedTuple

from ringjax.attention.ring import HOP_SCOPE, KERNEL_SCOPE
from ringjax.parallel.collectives import results
from ringjax.parallel.program_text import Program, called

_HOP = re.compile(r"%(\S+) = (.*?) collective-permute(-start)?\(")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
# What a kernel is made of in the end: one of its own, or the products of the portable one.
_WORK = re.compile(r" (?:custom-call|dot|convolution)\(")


class Hop(NamedTuple):
    """One message of the ring.

    Attributes:
      dtype: of what travels, as XLA writes it. Integers are tokens that the mask needs, a message of their own.
      shape: on one device.
      backward: whether it belongs to the backward pass.
      covered: whether a kernel of attention runs between its start and its done.
      times: how often each device sends it in one run of the program.
    """

    dtype: str
    shape: tuple[int, ...]
    backward: bool
    covered: bool
    times: int

    @property
    def is_of_tokens(self) -> bool:
        """Whether it is what the mask needs of the keys: a few bytes for each."""
        return self.dtype.startswith(("s", "u", "pred"))


def read_hops(text: str) -> list[Hop]:
    """Every message of the ring.

    Args:
      text: `compiled.as_text()` of a scheduled program.

    Raises:
      ValueError: a loop with hops in it has no known number of trips.
    """
    program = Program.read(text)
    runs = program.runs(_is_hop)
    works = program.holding(_is_work)
    found = []
    for name, lines in program.bodies.items():
        if not runs[name]:
            continue
        busy = [_is_work(line) or any(map(works, called(line))) for line in lines]
        for at, line in enumerate(lines):
            if _is_hop(line):
                found += _hops(line, any(busy[at + 1 : _done(lines, at)]), runs[name])
    return found


def covered(hops: list[Hop]) -> tuple[int, int]:
    """How many of the messages are covered, and how many there are."""
    return sum(hop.times for hop in hops if hop.covered), sum(hop.times for hop in hops)


def _is_hop(line: str) -> bool:
    return _HOP.search(line) is not None and HOP_SCOPE in _op_name(line)


def _is_work(line: str) -> bool:
    return _WORK.search(line) is not None and KERNEL_SCOPE in _op_name(line)


def _op_name(line: str) -> str:
    match = _OP_NAME.search(line)
    return match[1] if match else ""


def _done(lines: list[str], at: int) -> int:
    """Where the transfer that begins on a line ends; right there if it is not in two halves."""
    match = _HOP.search(lines[at])
    assert match is not None
    if not match[3]:
        return at
    done = re.compile(rf" collective-permute-done\(.*%{re.escape(match[1])}[,)]")
    return next(end for end in range(at, len(lines)) if done.search(lines[end]))


def _hops(line: str, covered: bool, times: int) -> list[Hop]:
    """The messages of an operation; compilers for GPUs make one of several that leave together."""
    match = _HOP.search(line)
    assert match is not None
    arrays = results(match[2], "collective-permute", bool(match[3]))
    return [Hop(dtype, shape, "transpose(" in _op_name(line), covered, times) for dtype, shape in arrays]
