"""Reads rows from jsonl and csv files, in the same way at submission and on the worker."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
BEYOND = "(beyond the header)"  # the column of a csv row's fields for which the header has no name


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .jsonl, .json or .csv file; ValueError says what is wrong in which line, OSError passes through."""
    try:
        yield from _csv(path) if path.suffix == ".csv" else _json_lines(path)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path.name} cannot be read as UTF-8 {path.suffix[1:]}: {error}") from error


def _csv(path: Path) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(sys.maxsize)
    with path.open(newline="", encoding="utf-8") as stream:
        yield from csv.DictReader(stream, restkey=BEYOND)


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except RecursionError as error:
                raise ValueError(f"{path.name}, line {number}: nested too deeply") from error
            except ValueError as error:
                raise ValueError(f"{path.name}, line {number}: not JSON ({getattr(error, 'msg', error)})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path.name}, line {number}: a row must be a JSON object")
            yield row


def class_number(value: Any) -> int | None:
    """The class that a label stands for, a whole number from 0 on; None for any other value."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if number < 0 or (isinstance(value, float) and value != number) else number
