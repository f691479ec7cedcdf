"""Reads rows from jsonl, csv and parquet files, folders and hub datasets, without the `datasets` package."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from service.contract.job import DatasetSpec
from service.contract.rows import ENDINGS, read
from worker.child.problem import JobProblem

Row = dict[str, Any]


def read_file(path: Path) -> Iterator[Row]:
    """The rows of one file; JobProblem names file and line of what cannot be read."""
    if path.suffix == ".parquet":
        yield from _parquet(path)
    elif path.suffix in ENDINGS:
        try:
            yield from read(path)
        except ValueError as error:
            raise JobProblem(str(error)) from error
    else:
        raise JobProblem(f"{path.name}: datasets are read from {', '.join(ENDINGS)} files")


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise JobProblem(f"{path.name} is parquet, which needs pyarrow: pip install pyarrow on the worker") from error
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise JobProblem(
            f"{path.name} is not a parquet file: {str(error).splitlines()[0][:200].rstrip('.')}"
        ) from error


def files_of(source: Path, split: str) -> list[Path]:
    """The files of one split: the file itself, or a folder's files with the split in their path."""
    if source.is_file():
        return [source]
    every = sorted(path for path in source.rglob("*") if path.suffix in ENDINGS and path.is_file())
    whole = re.compile(rf"(^|[-_./]){re.escape(split)}($|[-_./])") if split else re.compile("")
    return [path for path in every if whole.search(str(path.relative_to(source)))]


def read_splits(dataset: DatasetSpec, source: Path) -> tuple[list[Row], list[Row]]:
    """(train, validation) rows. JobProblem when there are none, or too few to hold some out."""
    splits = dataset.splits
    if splits.column:
        rows = list(itertools.chain.from_iterable(read_file(path) for path in files_of(source, "")))
        for number, row in enumerate(rows, 1):
            if splits.column not in row:
                where = f"row {number} of {source.name}"
                raise JobProblem(f"dataset.splits.column: there is no column {splits.column!r} in {where}")
        train = [row for row in rows if str(row[splits.column]) == splits.train]
        held = [row for row in rows if str(row[splits.column]) == splits.validation] if splits.validation else []
    else:
        held_files = files_of(source, splits.validation) if splits.validation and source.is_dir() else []
        files = files_of(source, splits.train)
        if not files and splits.train == "train":  # no file is called so: all are, but those held out
            files = [path for path in files_of(source, "") if path not in held_files]
        train, held = _read(files), _read(held_files)
    if not train:
        raise JobProblem(f"dataset {source.name} has no training rows (split {splits.train!r})")
    if splits.validation and not held:
        raise JobProblem(f"dataset {source.name} has no validation rows (split {splits.validation!r})")
    if not held:
        share = splits.validation_fraction
        out = [int((at + 1) * share) != int(at * share) for at in range(len(train))]
        held = list(itertools.compress(train, out)) or train[:1]
        train = [row for row, taken in zip(train, out, strict=True) if not taken]
    return train, held


def _read(files: list[Path]) -> list[Row]:
    return list(itertools.chain.from_iterable(read_file(path) for path in files))
