"""Parses a job's text as JSON, or else as YAML without aliases, tags and dates, which no job needs.

Parsing takes bounded time and memory: PyYAML is written in Python and needs a second and a hundred megabytes for some
hundred thousand values, and its numbers of base 60 take time that grows with the square of their digits.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from service.errors import MalformedBody
from service.text import first_line

MOST_VALUES = 2_000  # mappings, lists, keys and values of a text; a job has about fifty
MOST_LEVELS = 20
MOST_YAML_BYTES = 512 << 10  # the largest chat template (100,000 characters) fits, and JSON may be larger
# YAML 1.2's plain decimal numbers. YAML 1.1's others (0x1F, 0o17, 017, 1_000, 1:30:00) are text here, as in JSON.
INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,20})\Z")
FLOAT = re.compile(r"[-+]?(?:[0-9]{1,400}\.[0-9]{0,400}|\.[0-9]{1,400}|[0-9]{1,400}(?=[eE]))(?:[eE][-+]?[0-9]{1,5})?\Z")
READ_OTHERWISE = {f"tag:yaml.org,2002:{name}" for name in ("timestamp", "int", "float")}
TOO_DEEP = "is nested too deeply; a job has four levels"
TOO_MANY = f"holds more than {MOST_VALUES:,} values; a job has about fifty"


class _Limit(Exception):
    """The text is larger than any job; the message says how, as the end of a sentence."""


class _NotRead(yaml.MarkedYAMLError):
    """The text is YAML, with something that is not read; `problem` names it."""


class _Loader(yaml.SafeLoader):
    """Refuses aliases, which can expand to gigabytes, and tags, which make objects that JSON cannot represent."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in READ_OTHERWISE]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _values = _levels = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        tagged = getattr(event, "tag", None) not in (None, "!")
        if tagged or self.check_event(yaml.AliasEvent):  # type: ignore[no-untyped-call]
            raise _NotRead(problem="tags (!name)" if tagged else "aliases (*name)", problem_mark=event.start_mark)
        self._values += 1
        self._levels += 1
        if self._values > MOST_VALUES:
            raise _Limit(TOO_MANY)
        if self._levels > MOST_LEVELS:
            raise _Limit(TOO_DEEP)
        node = super().compose_node(parent, index)  # type: ignore[no-untyped-call]
        self._levels -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in keys:
                is_text = isinstance(key, yaml.ScalarNode)
                problem = f"{key.value!r:.80} is there twice" if is_text else "a key must be text"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:int", INTEGER, list("-+0123456789"))  # type: ignore[no-untyped-call]
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))  # type: ignore[no-untyped-call]


def read(text: bytes, what: str, of: str = "at least model and dataset") -> dict[str, Any]:
    """The mapping that a JSON or YAML text is; MalformedBody, which calls the text `what`, when it is none."""
    try:
        data = _load(text.decode("utf-8-sig"))
        _check_size(data)
    except (RecursionError, _Limit) as error:
        raise MalformedBody(f"{what} {error if isinstance(error, _Limit) else TOO_DEEP}.") from error
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or first_line(error)
        if isinstance(error, _NotRead):
            raise MalformedBody(f"{what} is YAML with {problem}{where}, which are not read.") from error
        raise MalformedBody(f"{what} is neither JSON nor YAML{where}: {problem:.300}.") from error
    if not isinstance(data, dict):
        raise MalformedBody(f"{what} must be a mapping with {of}.")
    return data


def _load(text: str) -> Any:
    try:
        # JSON is tried first, because YAML refuses tabs and misreads escaped emoji.
        return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    except json.JSONDecodeError:
        if len(text) > MOST_YAML_BYTES:
            raise _Limit(f"is no JSON, and as YAML it is too large: {MOST_YAML_BYTES >> 10} KiB are read") from None
        return yaml.load(text, _Loader)  # noqa: S506 - _Loader is a SafeLoader


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError where a key is there twice, of which JSON parsers silently take the last."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"{key!r:.80} is there twice")
        made[key] = value
    return made


def merged(target: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """The target with a JSON merge patch applied (RFC 7396): null removes a field, mappings are merged in turn."""
    found = dict(target)
    for name, value in patch.items():
        if value is None:
            found.pop(name, None)
        elif isinstance(value, dict):
            before = found.get(name)
            found[name] = merged(before if isinstance(before, dict) else {}, value)
        else:
            found[name] = value
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _check_size(data: Any) -> None:
    """_Limit where parsed data hold too many values (JSON is parsed whole, and fast, before they are counted)."""
    left, waiting = MOST_VALUES, [data]
    while waiting:
        value = waiting.pop()
        left -= 1
        if left < 0:
            raise _Limit(TOO_MANY)
        if isinstance(value, dict):
            left -= len(value)
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
