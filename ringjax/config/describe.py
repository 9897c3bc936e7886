"""The settings as a list: what each may hold, its default, what it means, and which one a wrong name meant.

Everything is read off the schema, so messages and `--help` cannot drift from what is accepted.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from ringjax.config.schema import Config

SIMILAR = 0.65  # share of common letters from which a name counts as a slip of another
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class Setting:
    """One setting of the schema.

    Attributes:
      section: the group it belongs to, as "model".
      name: its name there, as "heads".
      requirement: what it may hold, in words, as "an integer >= 1".
      choices: the words it may hold, if it is a choice of words.
      takes_text: whether some text is legal.
      default: the value it has when nobody sets it.
      description: what it means.
    """

    section: str
    name: str
    requirement: str
    choices: tuple[str, ...]
    takes_text: bool
    default: Any
    description: str

    @property
    def key(self) -> str:
        """The dotted path, as "model.heads"."""
        return f"{self.section}.{self.name}"


@cache
def sections() -> dict[str, str]:
    """Names of the sections, in the order of the schema, with one line on each."""
    return {
        name: (field.annotation.__doc__ or "").splitlines()[0]
        for name, field in Config.model_fields.items()
        if field.annotation is not None
    }


@cache
def settings() -> dict[str, Setting]:
    """Every setting by its dotted path, in the order of the schema."""
    schema = Config.model_json_schema()
    found = {}
    for section in sections():
        group = schema["$defs"][schema["properties"][section]["$ref"].rsplit("/", 1)[1]]
        for name, rule in group["properties"].items():
            branches = rule.get("anyOf", [rule])
            setting = Setting(
                section=section,
                name=name,
                requirement=" or ".join(_requirement(branch) for branch in branches),
                choices=tuple(word for branch in branches for word in _choices(branch)),
                takes_text=any(branch["type"] == "string" for branch in branches),
                default=rule["default"],
                description=rule["description"],
            )
            found[setting.key] = setting
    return found


def nearest(key: str) -> str | None:
    """The section or setting that a wrong path most likely meant, searched in the whole tree.

    The same name in another section beats a similar name in the same section.

    Args:
      key: a path that is not in the schema, as "model.seq_len" or "modle".

    Returns:
      A path that is, as "data.seq_len" or "model"; None if nothing is similar.
    """
    section, dot, name = key.partition(".") if "." in key else ("", "", key)
    scores = {s.key: _similarity(name, s.name) + 0.01 * (s.section == section) for s in settings().values()}
    if not dot:
        scores |= {candidate: _similarity(name, candidate) + 0.01 for candidate in sections()}
    best = max(scores, key=scores.__getitem__)
    return best if scores[best] >= SIMILAR else None


def nearest_choice(word: str, choices: Iterable[str]) -> str | None:
    """The choice that a wrong word most likely meant, or None."""
    return next(iter(difflib.get_close_matches(word, list(choices), n=1)), None)


def _similarity(wrong: str, right: str) -> float:
    """1 for equal names; a shortened name, as `warmup` for `warmup_steps`, counts as a slip."""
    shortened = len(wrong) >= 3 and right.startswith(wrong)
    return max(difflib.SequenceMatcher(None, wrong.lower(), right).ratio(), SIMILAR if shortened else 0.0)


def _choices(rule: dict[str, Any]) -> tuple[str, ...]:
    """The words that a rule of the JSON schema lists."""
    listed = rule.get("enum", [rule["const"]] if "const" in rule else [])
    return tuple(word for word in listed if isinstance(word, str))


def _requirement(rule: dict[str, Any]) -> str:
    """A rule of the JSON schema in words."""
    if "const" in rule:
        return str(rule["const"])
    if "enum" in rule:
        return "one of " + ", ".join(rule["enum"])
    bounds = " and ".join(f"{sign} {rule[name]:.15g}" for name, sign in _BOUNDS.items() if name in rule)
    match rule["type"]:
        case "integer" | "number" as kind:
            return f"{'an' if kind == 'integer' else 'a'} {kind} {bounds}".rstrip()
        case "string":
            return "non-empty text" if rule.get("minLength") else "text"
        case "boolean":
            return "true or false"
        case "array":
            items = rule["items"]
            return f"a list, each {' or '.join(_requirement(item) for item in items.get('anyOf', [items]))},"
        case kind:
            return kind
