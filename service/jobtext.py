"""Parses a job's text as JSON, or else as YAML without aliases, tags and dates, which no job needs."""

from __future__ import annotations

import json
from typing import Any

import yaml

from service.errors import MalformedBody

DATE = "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):
    """Refuses aliases, which can expand to gigabytes, and tags, which make objects that JSON cannot represent."""

    # Without the date type, an unquoted 2026-01-01 is text, as in JSON.
    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != DATE]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        tagged = getattr(event, "tag", None) not in (None, "!")
        if tagged or self.check_event(yaml.AliasEvent):  # type: ignore[no-untyped-call]
            problem = f"{'tags (!name)' if tagged else 'aliases (*name)'} are not read"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)  # type: ignore[no-untyped-call]


def read(text: bytes, what: str) -> dict[str, Any]:
    """The mapping that a JSON or YAML text is; MalformedBody, which calls the text `what`, when it is none."""
    try:
        data = _load(text.decode("utf-8-sig"))
    except RecursionError as error:
        raise MalformedBody(f"{what} is nested too deeply; a job has four levels.") from error
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise MalformedBody(f"{what} is neither JSON nor YAML{where}: {problem}.") from error
    if not isinstance(data, dict):
        raise MalformedBody(f"{what} must be a mapping with at least model and dataset.")
    return data


def _load(text: str) -> Any:
    try:
        return json.loads(text)  # tried first, because YAML refuses tabs and misreads escaped emoji
    except json.JSONDecodeError:
        return yaml.load(text, _Loader)  # noqa: S506 - _Loader is a SafeLoader
