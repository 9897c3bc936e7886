"""Reading settings from a YAML file and the command line, and writing them back.

Every problem of a file and of its overrides is found in one go, before any device is touched.
"""

import difflib
from collections.abc import Container, Iterable
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ringjax.config import dialect
from ringjax.config.check import check_config
from ringjax.config.describe import nearest, nearest_choice, sections, settings
from ringjax.config.errors import ConfigError
from ringjax.config.schema import Config

COMMAND_LINE = "command line"
_KINDS = {bool: "truth value", int: "integer", float: "number", str: "text", list: "list", dict: "mapping"}


def load_config(path: str | PathLike[str], overrides: Iterable[str] = ()) -> Config:
    """Read a run's settings from a YAML file, with `key.path=value` overrides on top.

    The file holds sections of settings and needs only what differs from the defaults; an empty file is legal. The
    value of an override is written as in the file (`optim.lr=1e-4`, `data.path=null`), except that one starting
    with `*` needs no quotes. Of two overrides of one setting the last one counts.

    Args:
      path: the YAML file, UTF-8.
      overrides: as given on the command line.

    Returns:
      The settings, every rule of the schema and of `check_config` kept.

    Raises:
      ConfigError: with all problems found, each with its file and line, or the override it stands in.

    Example:
      >>> load_config("configs/quickstart.yaml", ["mesh.seq=2"]).mesh.seq
      2
    """
    draft = _Draft(fspath(path))
    draft.read_file()
    for override in overrides:
        draft.read_override(override)
    return draft.finish()


def dump_config(config: Config) -> str:
    """Write all settings as YAML that `load_config` reads back equal."""
    return dialect.dump(config.model_dump())


@dataclass(frozen=True)
class _Entry:
    """A value somebody set: where, as the start of a message about it, and what was written."""

    value: Any
    written: str
    line: float  # infinity on the command line, which is reported last
    where: str


class _Draft:
    """Settings being read: what was set, what was wrong with it, and which settings are therefore unknown."""

    def __init__(self, file: str):
        self.file = file
        self.entries: dict[str, _Entry] = {}
        self.problems: list[tuple[float, str]] = []
        self.doubtful: set[str] = set()  # settings or whole sections that are not what the user meant

    def read_file(self) -> None:
        """Take in the YAML file."""
        try:
            root = dialect.compose(Path(self.file).read_bytes().decode("utf-8-sig"))
        except OSError as error:
            return self._unreadable(0, _cannot_open(Path(self.file), error))
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            return self._unreadable(line, f"not UTF-8 text (byte {error.object[error.start]:#04x})")
        except dialect.DialectError as error:
            return self._unreadable(error.line, str(error))
        if root is None or _is_null(root):
            return None
        if not isinstance(root, yaml.MappingNode):
            return self._unreadable(_line(root), f"needs sections of settings, got a {_kind(root)}")
        for section, node in self._pairs(root, prefix=""):
            self._read_section(section, node)
        return None

    def read_override(self, override: str) -> None:
        """Take in one `key.path=value`."""
        key, equals, text = (part.strip() for part in override.partition("="))
        where = f"{COMMAND_LINE}: {key}{equals}{text}"
        if not equals or not key:
            self._report(float("inf"), f"{where}: an override is written key.path=value, as mesh.seq=4")
        elif key in sections():
            example = next(setting for setting in settings().values() if setting.section == key)
            self._report(
                float("inf"), f"{where}: {key} is a section; set its settings one by one, as {example.key}=..."
            )
        elif self._known(key, settings(), float("inf"), where):
            try:
                # The shell has eaten the quotes of a pattern; aliases have no meaning here.
                node = (
                    yaml.ScalarNode("tag:yaml.org,2002:str", text) if text.startswith("*") else dialect.compose(text)
                )
                value = None if node is None else dialect.construct(node)
            except dialect.DialectError as error:
                self._report(float("inf"), f"{where}: {error}", doubt=key)
            else:
                self.entries[key] = _Entry(value, _written(node, value), float("inf"), where)

    def finish(self) -> Config:
        """Check everything that was read and build the settings, or raise with all problems."""
        config = self._validated()
        for problem in check_config(config):
            doubts = {name for key in problem.keys for name in (key, key.split(".")[0])}
            if not doubts & self.doubtful:
                # An override is the later thought: point at it rather than at the file it was meant to change.
                set_here = [self.entries[key] for key in problem.keys if key in self.entries]
                entry = max(set_here, key=lambda entry: entry.line == float("inf"), default=None)
                where, line = (entry.where, entry.line) if entry else (f"{self.file}: {problem.keys[0]}", 0)
                named = problem.keys[0] in where
                self._report(line, f"{where}: {problem.message if named else problem}")
        if self.problems:
            raise ConfigError([text for _, text in sorted(self.problems, key=lambda problem: problem[0])])
        return config

    def _validated(self) -> Config:
        """The settings by the schema; those that break it are reported and left at their defaults."""
        try:
            return Config.model_validate(self._tree())
        except ValidationError as errors:
            for key in dict.fromkeys(".".join(map(str, error["loc"][:2])) for error in errors.errors()):
                entry = self.entries.pop(key)
                self._report(entry.line, f"{entry.where}: {_mismatch(key, entry)}", doubt=key)
            return Config.model_validate(self._tree())

    def _tree(self) -> dict[str, dict[str, Any]]:
        """What was set, nested as the schema is."""
        tree: dict[str, dict[str, Any]] = {}
        for key, entry in self.entries.items():
            section, name = key.split(".")
            tree.setdefault(section, {})[name] = entry.value
        return tree

    def _read_section(self, section: str, node: yaml.Node) -> None:
        """Take in the settings of one section of the file."""
        where = f"{self.file}:{_line(node)}: {section}"
        if _is_null(node):
            return
        if not isinstance(node, yaml.MappingNode):
            self._report(_line(node), f"{where}: needs settings under it, got a {_kind(node)}", doubt=section)
            return
        for key, child in self._pairs(node, prefix=f"{section}."):
            line = _line(child)
            try:
                value = dialect.construct(child)
            except dialect.DialectError as error:
                self._report(error.line, f"{self.file}:{error.line}: {key}: {error}", doubt=key)
                continue
            self.entries[key] = _Entry(value, _written(child, value), line, f"{self.file}:{line}: {key}")

    def _pairs(self, node: yaml.MappingNode, prefix: str) -> Iterable[tuple[str, yaml.Node]]:
        """The legal keys of a mapping, with their nodes; the others are reported."""
        first_line: dict[str, int] = {}
        for key_node, child in node.value:
            line = _line(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self._report(line, f"{self.file}:{line}: a key must be a name, got a {_kind(key_node)}")
                continue
            key = prefix + key_node.value
            where = f"{self.file}:{line}: {key}"
            if key in first_line:
                again = f"set twice, first on line {first_line[key]}; keep one of them"
                self._report(line, f"{where}: {again}", doubt=key)
            elif self._known(key, settings() if prefix else sections(), line, where):
                yield key, child
            first_line.setdefault(key, line)

    def _known(self, key: str, legal: Container[str], line: float, where: str) -> bool:
        """Whether a section or setting is in the schema; if not, it is reported with the nearest that is."""
        if key in legal:
            return True
        section, dot, name = key.partition(".")
        if dot and section in sections():
            names = ", ".join(setting.name for setting in settings().values() if setting.section == section)
            problem, advice, meant = "unknown key", f"{section} has {names}", nearest(key)
        else:
            problem, advice = "unknown section", f"the sections are {', '.join(sections())}"
            meant = nearest(section)
            if f"{meant}.{name}" in settings():
                meant = f"{meant}.{name}"
        if key in settings():
            problem, advice, meant = "unknown section", f"write {name} on a line of its own under {section}:", key
        elif meant:
            advice = f"did you mean {meant}?"
        self._report(line, f"{where}: {problem}; {advice}", doubt=meant)
        return False

    def _unreadable(self, line: int, message: str) -> None:
        """Report that the file as a whole says nothing."""
        self._report(line, f"{self.file}:{line}: {message}" if line else f"{self.file}: {message}")
        self.doubtful |= set(sections())

    def _report(self, line: float, text: str, doubt: str | None = None) -> None:
        """Note a problem, and the setting or section whose intended value is unknown because of it."""
        self.problems.append((line, text))
        if doubt:
            self.doubtful.add(doubt)


def _mismatch(key: str, entry: _Entry) -> str:
    """What a setting needs and what it got."""
    setting = settings()[key]
    message = f"must be {setting.requirement}, got {entry.written}"
    if isinstance(entry.value, str):
        meant = nearest_choice(entry.value, setting.choices)
        return f"{message}; did you mean {meant}?" if meant else message
    if setting.takes_text and not setting.choices and isinstance(entry.value, bool | int | float):
        return f"{message}; write it in quotes to make it text"
    return message


def _written(node: yaml.Node | None, value: Any) -> str:
    """A value as the user wrote it, with its type, short enough for a message."""
    if value is None:
        return "null"
    text = repr(value) if isinstance(value, str) or not isinstance(node, yaml.ScalarNode) else node.value
    text = text if len(text) <= 60 else f"{text[:57]}..."
    if isinstance(value, bool) and text.lower() != str(value).lower():
        return f"{text} (which YAML reads as {str(value).lower()})"
    return f"{text} ({_KINDS[type(value)]})"


def _cannot_open(path: Path, error: OSError) -> str:
    """Why a file could not be read, with the nearest name if it is missing."""
    if isinstance(error, IsADirectoryError):
        return "is a folder; give the YAML file itself"
    if not isinstance(error, FileNotFoundError):
        return f"cannot be read: {error.strerror}"
    beside = [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
    similar = difflib.get_close_matches(path.name, beside, n=1)
    return "no such file" + (f"; did you mean {path.parent / similar[0]}?" if similar else "")


def _is_null(node: yaml.Node) -> bool:
    """Whether a node is null, as a section whose lines are all comments is."""
    return node.tag == "tag:yaml.org,2002:null"


def _kind(node: yaml.Node) -> str:
    """What a node is, in a word."""
    return {yaml.ScalarNode: "single value", yaml.SequenceNode: "list", yaml.MappingNode: "mapping"}[type(node)]


def _line(node: yaml.Node) -> int:
    """The line a node starts on, counted from 1."""
    return node.start_mark.line + 1
