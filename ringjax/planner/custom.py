"""Hardware of one's own: a YAML file of chips and of what was measured on them.

    cluster:
      like: h100                  # every number that is not given is that chip's
      network_gb_per_s: 45        # reached, from one GPU to one on another host
      attention_tflops: 610       # measured in bfloat16, forward
      attention_backward_tflops: 480

Rates are those of bfloat16, and of the peak in float32 the same shares are taken to be reached. A chip without `like`
gives memory, peak, memory bandwidth and link itself.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import yaml

from ringjax.config import ConfigError
from ringjax.config.dialect import DialectError, compose, construct
from ringjax.planner.hardware import CHIPS, GIB, Chip, Link

_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6
LEAST, MOST = 1e-6, 1e9  # of any number of a chip, in its unit
_NAME = re.compile(r"[a-zA-Z][\w-]*", re.ASCII)
_NEEDED = ("platform", "memory_gib", "peak_tflops", "memory_gb_per_s", "link_gb_per_s")


def _set(name: str, factor: float = 1.0) -> Callable[[Chip, Any], Chip]:
    return lambda chip, value: replace(chip, **{name: value * factor})


def _set_link(which: str, name: str, factor: float) -> Callable[[Chip, Any], Chip]:
    def change(chip: Chip, value: Any) -> Chip:
        link = getattr(chip, which) or Link(which, 0.0, 0.0)
        return replace(chip, **{which: replace(link, **{name: value * factor, "source": "given"})})

    return change


# What a file may say of a chip, and what it changes.
_NUMBERS: dict[str, Callable[[Chip, Any], Chip]] = {
    "memory_gib": lambda chip, value: replace(chip, memory=round(value * GIB)),
    "peak_tflops": _set("peak", _TERA),
    "peak_float32_tflops": _set("peak_float32", _TERA),
    "memory_gb_per_s": _set("memory_bandwidth", _GIGA),
    "link_gb_per_s": _set_link("link", "bandwidth", _GIGA),
    "link_latency_us": _set_link("link", "latency", _MICRO),
    "network_gb_per_s": _set_link("network", "bandwidth", _GIGA),
    "network_latency_us": _set_link("network", "latency", _MICRO),
    "devices_per_host": lambda chip, value: replace(chip, host=int(value)),
    "dense_tflops": _set("dense_rate", _TERA),
    "attention_tflops": _set("attention_rate", _TERA),
    "attention_backward_tflops": _set("attention_backward_rate", _TERA),
}
_TEXTS = ("like", "platform", "source")


def load_chips(path: str) -> dict[str, Chip]:
    """The chips of a YAML file, by name, beside those that ringjax knows.

    Args:
      path: of a mapping from names to what is known of the chip.

    Raises:
      ConfigError: with every problem of the file.
    """
    try:
        root = compose(Path(path).read_text(encoding="utf-8"))
        if root is not None:
            _refuse_doubles(root)
        entries = None if root is None else construct(root)
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: cannot be read as a file of hardware: {error}"]) from error
    except OSError as error:
        raise ConfigError([f"--hardware-file {path!r} cannot be read: {error.strerror}"]) from error
    except DialectError as error:
        raise ConfigError([f"{path}:{error.line}: {error}"]) from error
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ConfigError([f"{path}: needs names of chips, each with its numbers under it, as in\n{_example()}"])
    problems: list[str] = []
    found = dict(CHIPS)
    for name, entry in entries.items():
        wrong = _problems(entry, found)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            wrong.append("a chip's name must be of letters, digits, _ and -, and begin with a letter")
        if not wrong:
            chip = _chip(name.lower(), entry, found, path)
            wrong = _contradictions(chip, entry)
            found[chip.name] = chip
        problems += [f"{path}: {name}: {text}" for text in wrong]
    if problems:
        raise ConfigError(problems)
    return found


def _refuse_doubles(node: yaml.Node) -> None:
    """Of two equal names YAML would keep the last one only."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue  # no name: refused where values are made
        if key.value in seen:
            raise DialectError(key.start_mark.line + 1, f"{key.value} is there twice; leave one out")
        seen.add(key.value)
        _refuse_doubles(value)


def _contradictions(chip: Chip, entry: Mapping[str, Any]) -> list[str]:
    """What numbers, each of them possible, do not say together."""
    problems = []
    for key, rate in (
        ("dense_tflops", chip.dense_rate),
        ("attention_tflops", chip.attention_rate),
        ("attention_backward_tflops", chip.attention_backward_rate),
    ):
        if rate is not None and rate > chip.peak:
            problems.append(
                f"{key} is what is reached of the peak, {chip.peak / _TERA:g} (peak_tflops), and cannot be above it; "
                f"got {entry.get(key, rate / _TERA)}"
            )
    if chip.host is None and any(key in entry for key in ("network_gb_per_s", "network_latency_us")):
        problems.append("a network would be ignored without devices_per_host: beyond so many devices it begins")
    return problems


def find_chip(name: str, chips: Mapping[str, Chip] | None = None) -> Chip:
    """The chip of a name.

    Args:
      name: as "h100", in either case.
      chips: to choose from; None = those that ringjax knows.

    Raises:
      ConfigError: there is none, with the nearest names.
    """
    chips = CHIPS if chips is None else chips
    if chip := chips.get(str(name).lower()):
        return chip
    near = difflib.get_close_matches(str(name).lower(), chips, n=3, cutoff=0.4)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError([f"unknown hardware {name!r}; {meant}there are {', '.join(chips)}; a YAML file adds others"])


def _chip(name: str, entry: dict[str, Any], chips: Mapping[str, Chip], path: str) -> Chip:
    if like := entry.get("like"):
        chip = replace(chips[like.lower()], name=name)
    else:
        peak = float(entry["peak_tflops"]) * _TERA
        chip = Chip(name, entry["platform"], 0, 1, peak, peak, 0.0, Link("link", 0.0, 0.0))
    for key, change in _NUMBERS.items():
        if key in entry:
            chip = change(chip, entry[key])
    source = entry.get("source", f"given in {path}")
    return replace(chip, sources={**chip.sources, **{key: source for key in entry if key in _NUMBERS}})


def _problems(entry: dict[str, Any], chips: Mapping[str, Chip]) -> list[str]:
    """What is wrong with what a file says of a chip."""
    legal, problems = (*_NUMBERS, *_TEXTS), []
    for key, value in entry.items():
        if key not in legal:
            near = difflib.get_close_matches(str(key), legal, n=1)
            meant = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(legal)}"
            problems.append(f"unknown key {key}{meant}")
        elif key in _NUMBERS and (
            isinstance(value, bool) or not isinstance(value, int | float) or not LEAST <= value <= MOST
        ):
            problems.append(f"{key} must be a number from {LEAST:g} to {MOST:g}, got {shorten(repr(value), 40)}")
        elif key == "devices_per_host" and value != int(value):
            problems.append(f"{key} must be an integer, got {value!r}")
        elif key == "platform" and value not in ("tpu", "gpu", "cpu"):
            problems.append(f"platform must be tpu, gpu or cpu, got {value!r}")
        elif key == "source" and not isinstance(value, str):
            problems.append(f"source must be a text, got {value!r}")
        elif key == "like" and not (isinstance(value, str) and value.lower() in chips):
            near = difflib.get_close_matches(str(value), chips, n=1, cutoff=0.4)
            problems.append(
                f"like: unknown hardware {value!r}; "
                + (f"did you mean {near[0]}?" if near else f"there are {', '.join(chips)}")
            )
        elif key == "like" and "platform" in entry and entry["platform"] != chips[str(value).lower()].platform:
            own = chips[str(value).lower()].platform
            problems.append(f"platform is that of {value}, {own}: leave it out, got {entry['platform']}")
    if "like" not in entry and (missing := [key for key in _NEEDED if key not in entry]):
        problems.append(f"needs {', '.join(missing)}, or like: with the name of a chip that is near")
    return problems


def _example() -> str:
    return "  ours:\n    like: h100\n    network_gb_per_s: 45"
