"""The YAML that settings are written in: plain values, each with its line.

YAML 1.1 as PyYAML reads it, minus its traps: `1e-4` is a number, `010` and `1:30` are text and not the integers 8
and 90, dates are text, and what makes a file say something else than it seems to (tags, anchors, aliases) is
refused.
"""

import re
from typing import Any

import yaml

MAX_DEPTH = 20  # of nested lists and mappings; settings need three

_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$")
_NUMBER = re.compile(
    r"(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_KEPT = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:null")


class DialectError(Exception):
    """The text is not the YAML that settings are written in; `line` counts from 1."""

    def __init__(self, line: int, message: str):
        super().__init__(message)
        self.line = line


class _Loader(yaml.SafeLoader):
    """SafeLoader with the number rules above."""

    yaml_implicit_resolvers = {  # noqa: RUF012, PyYAML's own class attribute
        first: [(tag, pattern) for tag, pattern in rules if tag in _KEPT]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes the text which `_Loader` would take for a number."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Without escapes, YAML reads the rarer line breaks (U+0085, U+2028, ...) as blanks.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _text)

for _tag, _pattern in (("tag:yaml.org,2002:int", _INTEGER), ("tag:yaml.org,2002:float", _NUMBER)):
    _Loader.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))
    _Dumper.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))


def compose(text: str) -> yaml.Node | None:
    """Read text into nodes that know their lines; None if it is empty.

    Raises:
      DialectError: it is not valid YAML, or uses tags, anchors, aliases or absurd nesting.
    """
    try:
        _refuse_indirection(text)
        return yaml.compose(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise DialectError(line, f"not valid YAML: the character {chr(error.character)!r} is not allowed") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        hint = "; a value that starts with * needs quotes" if error.context == "while scanning an alias" else ""
        raise DialectError(mark.line + 1 if mark else 1, f"not valid YAML: {error.problem}{hint}") from error


def construct(node: yaml.Node) -> Any:
    """The plain Python value of a node that `compose` returned.

    Raises:
      DialectError: the node has no value, for instance an integer of ten thousand digits.
    """
    try:
        return yaml.constructor.SafeConstructor().construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        raise DialectError(node.start_mark.line + 1, "cannot be read as a value") from error


def dump(values: dict[str, Any]) -> str:
    """Write nested plain values as YAML that `compose` and `construct` read back equal."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def shown(value: Any) -> str:
    """A value as it would be written in a file, on one line."""
    return yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6).split("\n", 1)[0]


def _refuse_indirection(text: str) -> None:
    """Raise at the first thing that says something else than it shows, before anything is built from it."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or (isinstance(event, yaml.NodeEvent) and event.anchor):
            raise DialectError(line, f"YAML anchors and aliases ({event.anchor}) are not accepted; write the value")
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag:
            raise DialectError(line, f"YAML tags ({event.tag}) are not accepted; write the plain value")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise DialectError(line, f"nested more than {MAX_DEPTH} deep")
