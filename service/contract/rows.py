"""Reads rows from jsonl, json and csv files, in the same way at submission and on the worker."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
BEYOND = "(beyond the header)"  # the column of a csv row's fields for which the header has no name
UTF8 = "utf-8-sig"  # UTF-8, with a byte order mark at its beginning or without
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .jsonl, .json or .csv file; ValueError says what is wrong in which line, OSError passes through."""
    try:
        if path.suffix == ".csv":
            yield from _csv(path)
        else:
            yield from _json_array(path) if is_array(path) else _json_lines(path)
    except UnicodeDecodeError as error:
        sentence = f"{path.name} cannot be read as UTF-8 {path.suffix[1:]}, save it as UTF-8: {error}"
        raise ValueError(sentence) from error


def csv_options(path: Path) -> dict[str, Any]:
    """What csv.DictReader has to be told of a file: nothing for commas, else what its header is separated by.

    ValueError when two columns have one name, as one of them would be lost.
    """
    with path.open(newline="", encoding=UTF8) as stream:
        first = stream.readline()
        separator = max(SEPARATORS, key=first.count)
        names = next(csv.reader(chain([first], stream), delimiter=separator), [])
    for name in filter(None, names):
        if names.count(name) > 1:
            raise ValueError(f"{path.name}: its header names {name!r} twice; give each column a name of its own")
    return {} if separator == "," else {"delimiter": separator}


def _csv(path: Path) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(sys.maxsize)
    line = 1
    try:
        with path.open(newline="", encoding=UTF8) as stream:
            rows = csv.DictReader(stream, restkey=BEYOND, strict=True, **csv_options(path))
            for row in rows:
                yield row
                line = rows.line_num + 1
    except csv.Error as error:
        text = (
            "a quoted field begins in this row and does not end where a field ends; a quote within it is written twice"
        )
        raise ValueError(f"{path.name}, line {line}: {text} ({error})") from error


def is_array(path: Path) -> bool:
    """Whether a .json file holds one array of rows, not one row a line."""
    if path.suffix != ".json":
        return False
    with path.open(encoding=UTF8) as stream:
        return stream.read(4096).lstrip().startswith("[")


def _json_array(path: Path) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(_parsed(path.read_text(UTF8), path), 1):
        if not isinstance(row, dict):
            raise ValueError(f"{path.name}: row {number} of its array must be a JSON object")
        yield row


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding=UTF8) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            row = _parsed(line.rstrip("\n"), path, number)
            if not isinstance(row, dict):
                raise ValueError(f"{path.name}, line {number}: a row must be a JSON object")
            yield row


def _parsed(text: str, path: Path, line: int = 1) -> Any:
    """The value of a JSON text that begins in that line; ValueError names the line of a mistake in it."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{path.name}, line {line}: nested too deeply") from error
    except ValueError as error:
        at, reason = line + getattr(error, "lineno", 1) - 1, getattr(error, "msg", error)
        either = "a file holds one JSON object a line, or one array of them" if path.suffix == ".json" else ""
        raise ValueError(f"{path.name}, line {at}: not JSON ({reason}){'; ' if either else ''}{either}") from error
