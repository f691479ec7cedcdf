"""Reads rows from jsonl, csv and parquet files and folders of them, and splits them into training and validation."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.recipe import Recipe

Record = dict[str, Any]
# Splits that are not trained on, by their usual names.
HELD_OUT = ("test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation")
# Files that are no data: hidden ones, such as an editor's copies, and what the library `datasets` writes beside data.
NO_DATA = re.compile(r"(^|/)(\.|(dataset_infos?|dataset_dict|state)\.json$)")


def read_file(path: Path, recipe: Recipe) -> list[Record]:
    """The rows of one file."""
    if ".parquet" in recipe.formats and path.suffix == ".parquet":
        return read_parquet(path)
    if ".csv" in recipe.formats and path.suffix == ".csv":
        return read_csv(path, recipe)
    with path.open(encoding="utf-8-sig") as lines:  # as utf-8, but for a byte order mark at the beginning
        if recipe.json_arrays and path.suffix == ".json":
            return read_json(lines.read())
        return [json.loads(line) for line in lines if line.strip()]


def read_csv(path: Path, recipe: Recipe) -> list[Record]:
    """The rows of a csv file with a header."""
    csv.field_size_limit(sys.maxsize)
    with path.open(newline="", encoding="utf-8-sig") as stream:
        return list(csv.DictReader(stream, restkey="(beyond the header)", strict=True, **recipe.csv_options))


def read_json(text: str) -> list[Record]:
    """The rows of a .json file: one array of them, or one row a line."""
    if text.lstrip().startswith("["):
        return json.loads(text)
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def read_parquet(path: Path) -> list[Record]:
    """The rows of a parquet file."""
    from pyarrow import parquet

    batches = parquet.ParquetFile(path).iter_batches(use_threads=False)
    return [{name: as_written(one) for name, one in row.items()} for batch in batches for row in batch.to_pylist()]


def as_written(value: Any) -> Any:
    """A value without the nulls that parquet puts for fields of other rows, such as another tool's arguments."""
    if isinstance(value, list):
        return [as_written(one) for one in value]
    if isinstance(value, dict):
        return {name: as_written(one) for name, one in value.items() if one is not None or name == "content"}
    return value


def files_of(source: Path, splits: Sequence[str], recipe: Recipe) -> list[Path]:
    """The file itself, or the files of a folder with one of `splits` as a part of the path; without splits, all."""
    if source.is_file():
        return [source]
    files = [path for path in files_by(["**/*"], source, recipe) if not NO_DATA.search(str(path.relative_to(source)))]
    part = re.compile(rf"(^|[-_./])({'|'.join(map(re.escape, splits))})($|[-_./])" if splits else "")
    return [path for path in files if part.search(str(path.relative_to(source)))]


def files_by(patterns: Sequence[str], source: Path, recipe: Recipe) -> list[Path]:
    """The files of a folder that a pattern matches, and whose ending is one of the recipe's."""
    found = {path for pattern in patterns for path in source.glob(pattern)}
    return sorted(path for path in found if path.suffix in recipe.formats and path.is_file())


def files_to_train(source: Path, recipe: Recipe) -> tuple[list[Path], list[Path]]:
    """(the files of a folder that train, those that do not because they are named after a split that is held out).

    Where no file is named after the split `train`, all others train.
    """
    files, held = files_of(source, [recipe.train_split], recipe), files_to_validate(source, recipe)
    if not files and recipe.train_split == "train":
        files = files_of(source, ["training"], recipe)
    others = [path for path in files_of(source, HELD_OUT, recipe) if path not in (*files, *held)]
    if files or recipe.train_split != "train":
        return files, others
    return [path for path in files_of(source, [], recipe) if path not in (*held, *others)], others


def files_to_validate(source: Path, recipe: Recipe) -> list[Path]:
    """The files of a folder that are named after the split that validates; none where the job names no such split."""
    return files_of(source, [recipe.validation_split], recipe) if recipe.validation_split else []


def read_splits(source: Path, recipe: Recipe) -> tuple[list[Record], list[Record]]:
    """(training rows, validation rows); without a validation split, a share of the training rows is held out."""
    if recipe.below:
        source = source / recipe.below
    if recipe.split_column:
        paths = files_by(recipe.train_files, source, recipe) if recipe.train_files else files_of(source, [], recipe)
        rows = [row for path in paths for row in read_file(path, recipe)]
        train = [row for row in rows if str(row[recipe.split_column]) == recipe.train_split]
        held = [row for row in rows if str(row[recipe.split_column]) == recipe.validation_split]
    elif recipe.dataset_is_folder:
        if recipe.train_files:
            chosen = [files_by(recipe.train_files, source, recipe), files_by(recipe.validation_files, source, recipe)]
        else:
            chosen = [files_to_train(source, recipe)[0], files_to_validate(source, recipe)]
        train, held = ([row for path in files for row in read_file(path, recipe)] for files in chosen)
    else:
        train, held = read_file(source, recipe), []
    if recipe.validation_split:
        return train, held
    share = recipe.validation_fraction
    out = [int((at + 1) * share) != int(at * share) for at in range(len(train))]
    held = [row for row, taken in zip(train, out, strict=True) if taken] or train[:1]
    return [row for row, taken in zip(train, out, strict=True) if not taken], held


def texts_of(rows: list[Record], column: str, recipe: Recipe) -> list[str]:
    """The column's texts: numbers are written out where the data has some, and a null is an empty text."""
    if recipe.numbers_as_text:
        return ["" if row.get(column) is None else str(row[column]) for row in rows]
    return [row.get(column) or "" for row in rows]
