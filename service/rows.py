"""Reads rows from jsonl, json and csv files, in the same way at submission and on the worker."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
BEYOND = "(beyond the header)"  # the column of a csv row's fields for which the header has no name
UTF8 = "utf-8-sig"  # UTF-8, with a byte order mark at its beginning or without
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}
SPACE = re.compile(r"\s*")
QUOTED = re.compile(r'"[^"]*"')


class TooLong(Exception):
    """To read the next row, more characters would have to be read than are allowed."""


def read(path: Path, most: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a .jsonl, .json or .csv file; ValueError says what is wrong in which line, OSError passes through.

    Where `most` is given, TooLong at the first row that does not end within the file's first `most` characters.
    """
    try:
        if path.suffix == ".csv":
            yield from _csv(path, most)
        else:
            yield from _json_array(path, most) if is_array(path) else _json_lines(path, most)
    except UnicodeDecodeError as error:
        sentence = f"{path.name} cannot be read as UTF-8 {path.suffix[1:]}, save it as UTF-8: {error}"
        raise ValueError(sentence) from error


def csv_options(path: Path, most: int | None = None) -> dict[str, Any]:
    """What csv.DictReader has to be told of a file: nothing for commas, else what its header is separated by.

    ValueError when two columns have one name, as one of them would be lost; TooLong as in `read`.
    """
    with path.open(newline="", encoding=UTF8) as stream:
        lines = iter(_lines(stream, most))
        first = next(lines, "")
        separator = max(SEPARATORS, key=QUOTED.sub("", first).count)
        names = next(csv.reader(chain([first], lines), delimiter=separator), [])
    if twice := [name for name, count in Counter(filter(None, names)).items() if count > 1]:
        raise ValueError(f"{path.name}: its header names {twice[0]!r} twice; give each column a name of its own")
    return {} if separator == "," else {"delimiter": separator}


def _lines(stream: TextIO, most: int | None) -> Iterable[str]:
    """The lines of a text with their ends; TooLong where they have more than `most` characters, which is then read."""
    return stream if most is None else _first_lines(stream, most)


def _first_lines(stream: TextIO, most: int) -> Iterator[str]:
    while line := stream.readline(most + 1):
        most -= len(line)
        if most < 0:
            raise TooLong
        yield line


def _csv(path: Path, most: int | None) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(sys.maxsize)
    line = 1
    try:
        with path.open(newline="", encoding=UTF8) as stream:
            options = csv_options(path, most)
            rows = csv.DictReader(_lines(stream, most), restkey=BEYOND, strict=True, **options)
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


def _json_array(path: Path, most: int | None) -> Iterator[dict[str, Any]]:
    with path.open(encoding=UTF8) as stream:
        text = stream.read() if most is None else stream.read(most)
        whole = not stream.read(1)
    for number, row in enumerate(_parsed(text, path) if whole else _first_of_array(text), 1):
        if not isinstance(row, dict):
            raise ValueError(f"{path.name}: row {number} of its array must be a JSON object")
        yield row


def _first_of_array(text: str) -> Iterator[Any]:
    """The elements of a JSON array of which only the beginning is there, and TooLong at the one that cannot be read."""
    decoder, at = json.JSONDecoder(), text.index("[")
    while text[at : at + 1] in ("[", ","):
        try:
            row, at = decoder.raw_decode(text, _after_space(text, at + 1))
        except (ValueError, RecursionError):
            break
        yield row
        at = _after_space(text, at)
    raise TooLong


def _after_space(text: str, at: int) -> int:
    """The place of the first character from there on that is no white space."""
    space = SPACE.match(text, at)
    return space.end() if space else at


def _json_lines(path: Path, most: int | None) -> Iterator[dict[str, Any]]:
    with path.open(encoding=UTF8) as stream:
        for number, line in enumerate(_lines(stream, most), 1):
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
