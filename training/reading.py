"""Reads rows from jsonl, csv and parquet files and folders of them, and splits them into training and validation."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from training.recipe import Recipe

Record = dict[str, Any]
# Splits that are not trained on, by their usual names.
HELD_OUT = ("test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation")
# Files that are no data: hidden ones, such as an editor's copies, and what the library `datasets` writes beside data.
NO_DATA = re.compile(r"(^|/)(\.|(dataset_infos?|dataset_dict|state)\.json$)")


def read_file(path: Path, recipe: Recipe) -> Iterator[Record]:
    """The rows of one file, each read when it is asked for."""
    if ".parquet" in recipe.formats and path.suffix == ".parquet":
        yield from read_parquet(path)
    elif ".csv" in recipe.formats and path.suffix == ".csv":
        yield from read_csv(path, recipe)
    else:
        with path.open(encoding="utf-8-sig") as lines:  # as utf-8, but for a byte order mark at the beginning
            if recipe.json_arrays and path.suffix == ".json":
                yield from read_json(lines.read())
            else:
                yield from (json.loads(line) for line in lines if line.strip())


def read_csv(path: Path, recipe: Recipe) -> Iterator[Record]:
    """The rows of a csv file with a header."""
    csv.field_size_limit(sys.maxsize)
    with path.open(newline="", encoding="utf-8-sig") as stream:
        yield from csv.DictReader(stream, restkey="(beyond the header)", strict=True, **recipe.csv_options)


def read_json(text: str) -> list[Record]:
    """The rows of a .json file: one array of them, or one row a line."""
    if text.lstrip().startswith("["):
        return json.loads(text)
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def read_parquet(path: Path) -> Iterator[Record]:
    """The rows of a parquet file."""
    from pyarrow import parquet

    batches = parquet.ParquetFile(path).iter_batches(batch_size=1000, use_threads=False)
    rows = (row for batch in batches for row in batch.to_pylist())
    return ({name: as_written(one) for name, one in row.items()} for row in rows)


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


def training_files(source: Path, recipe: Recipe) -> list[Path]:
    """The files whose rows train; where a column names the splits, those that validate are in them too."""
    if not recipe.dataset_is_folder:
        return [source]
    if recipe.train_files:
        return files_by(recipe.train_files, source, recipe)
    if recipe.split_column:
        return files_of(source, [], recipe)
    return files_to_train(source, recipe)[0]


def validation_files(source: Path, recipe: Recipe) -> list[Path]:
    """The files all of whose rows validate."""
    if not recipe.dataset_is_folder:
        return []
    if recipe.train_files:
        return files_by(recipe.validation_files, source, recipe)
    return files_to_validate(source, recipe)


def read_splits(source: Path, recipe: Recipe) -> Iterator[tuple[bool, Record]]:
    """Each row that trains or validates, with whether it validates.

    Without a validation split, a share of the training rows is held out.
    """
    if recipe.below:
        source = source / recipe.below
    rows = (row for path in training_files(source, recipe) for row in read_file(path, recipe))
    if not recipe.validation_split:
        if recipe.split_column:
            rows = (row for row in rows if str(row[recipe.split_column]) == recipe.train_split)
        share = recipe.validation_fraction
        yield from ((int((at + 1) * share) != int(at * share), row) for at, row in enumerate(rows))
    elif recipe.split_column:
        for row in rows:
            split = str(row[recipe.split_column])
            if split == recipe.train_split:
                yield False, row
            if split == recipe.validation_split:
                yield True, row
    else:
        yield from ((False, row) for row in rows)
        yield from ((True, row) for path in validation_files(source, recipe) for row in read_file(path, recipe))


def texts_of(rows: list[Record], column: str, recipe: Recipe) -> list[str]:
    """The column's texts: numbers are written out where the data has some, and a null is an empty text."""
    if recipe.numbers_as_text:
        return ["" if row.get(column) is None else str(row[column]) for row in rows]
    return [row.get(column) or "" for row in rows]
