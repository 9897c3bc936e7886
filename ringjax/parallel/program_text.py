"""The text of a compiled program: its computations, and how often each of them runs."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%([\w.\-]+)")
_CALLED_LIST = re.compile(r"(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
_CONDITION = re.compile(r"condition=%([\w.\-]+)")
_BOUND = re.compile(
    r"ROOT %\S+ = pred\[\]\S* (?:compare\(%\S+, %(\S+)\), direction=LT"
    r"|fusion\(%\S+, %(\S+)\), .*calls=%wrapped_compare)"
)


@dataclass(frozen=True)
class Program:
    """What `compiled.as_text()` says.

    Attributes:
      bodies: the operations of each computation, one line each, in the order in which they run if it is scheduled.
      entry: the computation that the program begins with.
    """

    bodies: dict[str, list[str]]
    entry: str

    @classmethod
    def read(cls, text: str) -> "Program":
        """Cut a text into computations."""
        bodies: dict[str, list[str]] = {}
        entry = ""
        for line in text.splitlines():
            if match := _COMPUTATION.match(line):
                entry = match[2] if match[1] else entry
                body = bodies.setdefault(match[2], [])
            elif line.startswith("  "):
                body.append(line)
        return cls(bodies, entry)

    def holding(self, wanted: Callable[[str], bool]) -> Callable[[str], bool]:
        """Whether a line of some computation, or of one that it calls, is wanted: a function of its name."""

        @cache
        def holds(name: str) -> bool:
            return any(wanted(line) or any(map(holds, called(line))) for line in self.bodies[name])

        return holds

    def runs(self, wanted: Callable[[str], bool]) -> Counter[str]:
        """How often each computation runs that holds a wanted line, or calls one that does.

        Raises:
          ValueError: a loop around such a line has no known number of trips.
        """
        holds = self.holding(wanted)
        runs: Counter[str] = Counter()

        def run(name: str, times: int) -> None:
            runs[name] += times
            for line in self.bodies[name]:
                for inner in filter(holds, called(line)):
                    run(inner, times * self._times(line, inner))

        run(self.entry, 1)
        return runs

    def _times(self, line: str, inner: str) -> int:
        """How often an operation runs a computation that it calls."""
        if " while(" not in line:
            return 1
        conditions = _CONDITION.findall(line)
        written = _TRIPS.findall(line)
        trips = int(written[0]) if written else _bound(self.bodies[conditions[0]])
        if trips is None:
            raise ValueError(f"cannot count what is in a loop without a known number of trips: {line.strip()[:400]}")
        return trips + (inner in conditions)  # the condition is also what ends the loop


def called(line: str) -> Iterator[str]:
    """The computations that an operation calls."""
    yield from _CALLED.findall(line)
    yield from _CONDITION.findall(line)
    for names in _CALLED_LIST.findall(line):
        yield from (name.strip(" %") for name in names.split(","))


def loop_trips(text: str) -> list[int]:
    """How often each loop of a program runs, where its text says so."""
    return [int(count) for count in _TRIPS.findall(text)]


def _bound(condition: list[str]) -> int | None:
    """The constant below which a loop's counter stays: its trips, as jax's counters begin at 0 and go by 1.

    Programs for TPUs do not say how often a loop runs in any other way, nor do those for CPUs if XLA was not to know.
    """
    text = "\n".join(condition)
    match = _BOUND.search(text)
    value = re.search(rf"%{re.escape(match[1] or match[2])} = s\d+\[\]\S* constant\((\d+)\)", text) if match else None
    return int(value[1]) if value else None
