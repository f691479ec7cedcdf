"""Reads a job's rows with the training code, and says in one sentence what is wrong with data that cannot be read."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from service.contract.form import form_of, unfit
from service.contract.job import JobSpec
from service.rows import BEYOND, ENDINGS, SEPARATORS, csv_options, is_array, read
from service.tasks import TASKS
from service.text import counted, first_line, listed
from training.errors import TrainingError
from training.reading import Record, files_by, files_of, files_to_train, read_splits
from training.recipe import Recipe


def read_rows(spec: JobSpec, recipe: Recipe, source: Path) -> tuple[list[Record], list[Record], Recipe, list[str]]:
    """(training rows, validation rows, the recipe with the form and columns of the data, notes on what was assumed).

    TrainingError says in one sentence what is wrong with data that cannot be read.
    """
    source = source / recipe.below
    told = (*recipe.train_files, *recipe.validation_files)
    files = files_by(told, source, recipe) if told else files_of(source, [], recipe)
    if source.is_file() and source.suffix not in ENDINGS:
        raise TrainingError(f"{source.name}: datasets are read from {', '.join(ENDINGS)} files")
    if not files:
        raise TrainingError(_without_files(spec, recipe.dataset_is_local))
    formats = tuple(ending for ending in ENDINGS if any(file.suffix == ending for file in files))
    recipe = replace(recipe, formats=formats, dataset_is_folder=source.is_dir())
    try:
        recipe = replace(recipe, csv_options=_csv_options(files), json_arrays=any(map(is_array, files)))
        every = list(read_splits(source, replace(recipe, below="")))
    except (ValueError, TypeError, AttributeError, KeyError, ImportError, RecursionError, csv.Error) as error:
        _explain(files, recipe.split_column)
        raise TrainingError(f"dataset {spec.dataset.source} cannot be read: {str(error)[:300]}") from error
    if not all(isinstance(row, dict) for _, row in every):
        _explain(files, recipe.split_column)
    splits = spec.dataset.splits
    train, held_out = ([row for its, row in every if its == validates] for validates in (False, True))
    if not splits.validation:
        held_out = held_out or train[:1]
    left_out = _held_out_by_name(source, recipe)
    if not train:
        named = f"; its files are named after other splits: {left_out}" if left_out else ""
        raise TrainingError(f"dataset {spec.dataset.source} has no training rows (split {splits.train!r}){named}")
    if splits.validation and not held_out:
        raise TrainingError(f"dataset {spec.dataset.source} has no validation rows (split {splits.validation!r})")
    recipe, notes = _in_form(spec, recipe, train + held_out)
    if left_out:
        hint = "" if splits.validation else " (dataset.splits.validation may name the one that validates)"
        notes.append(f"Files that are named after other splits were not trained on: {left_out}{hint}.")
    return train, held_out, recipe, notes


def _without_files(spec: JobSpec, is_local: bool) -> str:
    """The sentence on a dataset that has no file which is read."""
    of = f" of the configuration {spec.dataset.config!r}" if spec.dataset.config else ""
    none = f"has no {', '.join(ENDINGS)} files{of}"
    if is_local:
        return f"dataset.source: the folder {spec.dataset.source} {none}; compressed files are not read"
    return (
        f"dataset {spec.dataset.source} {none}; compressed files and datasets with a script are not read: write them "
        "out first, or name revision: refs/convert/parquet and the config"
    )


def _held_out_by_name(source: Path, recipe: Recipe) -> str:
    """The first files of a folder that do not train because of their names."""
    if not recipe.dataset_is_folder or recipe.split_column or recipe.train_files:
        return ""
    return ", ".join(str(path.relative_to(source)) for path in files_to_train(source, recipe)[1][:8])


def _in_form(spec: JobSpec, recipe: Recipe, rows: Sequence[Record]) -> tuple[Recipe, list[str]]:
    """(the recipe with the columns and the form of the rows, notes on what was assumed of them)."""
    columns, left = _columns(spec, rows)
    try:
        fields, notes = form_of(TASKS[spec.task], columns, rows)
    except ValueError as error:
        raise TrainingError(str(error)) from error
    notes += left
    if "label" in columns and len({str(row[columns["label"]]) for row in rows}) == 1:
        only = rows[0][columns["label"]]
        raise TrainingError(
            f"dataset.columns.label: all rows have the label {only!r}, so there is nothing to tell apart"
        )
    if separator := recipe.csv_options.get("delimiter"):
        notes.append(f"The csv data was read as separated by {SEPARATORS[separator]}.")
    if beyond := sum(any(row.get(BEYOND, ())) for row in rows):
        have = counted(beyond, "csv row has", "csv rows have")
        notes.append(f"{have} more fields than the header, which were left out: quote texts with commas.")
    used = {*columns.values(), recipe.split_column, BEYOND}
    if unread := [repr(name) for name in rows[0] if name not in used]:
        read = " and ".join(f"{column!r} ({kind})" for kind, column in columns.items())
        more = f" and {len(unread) - 8} more" if len(unread) > 8 else ""
        notes.append(f"Of the data's columns {read} were read, and not {', '.join(unread[:8])}{more}.")
    if recipe.chat_template and "messages" not in columns:
        fields["chat_template"] = None
        notes.append(f"dataset.chat_template was not used: the data was read as {' and '.join(columns)}, not messages.")
    return replace(recipe, columns=columns, needed=TASKS[spec.task].needed(columns), **fields), notes


def _csv_options(files: Sequence[Path]) -> dict[str, Any]:
    """What csv.DictReader has to be told of all csv files; TrainingError where they are separated differently."""
    found = [(file.name, csv_options(file)) for file in files if file.suffix == ".csv"]
    for name, options in found[1:]:
        if options != found[0][1]:
            raise TrainingError(f"{found[0][0]} and {name} are separated differently; separate both by commas")
    return found[0][1] if found else {}


def _explain(files: Sequence[Path], split_column: str | None) -> None:
    """Read the files row by row, and raise TrainingError with the file, line and mistake of the first wrong row."""
    number = 0
    for path in files:
        if path.suffix == ".parquet":
            _explain_parquet(path)
            continue
        try:
            for row in read(path):
                number += 1
                if split_column and split_column not in row:
                    where = f"row {number} of {path.name}"
                    raise TrainingError(f"dataset.splits.column: there is no column {split_column!r} in {where}")
        except ValueError as error:
            raise TrainingError(str(error)) from error


def _explain_parquet(path: Path) -> None:
    """TrainingError when pyarrow is missing, or the file is not what its name says."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        sentence = f"{path.name} is parquet, which needs pyarrow: pip install pyarrow on the worker"
        raise TrainingError(sentence) from error
    try:
        pyarrow.parquet.read_schema(path)
    except pyarrow.ArrowInvalid as error:
        reason = first_line(error)[:200].rstrip(".")
        raise TrainingError(f"{path.name} is not a parquet file: {reason}") from error


def _columns(spec: JobSpec, rows: Sequence[Record]) -> tuple[dict[str, str], list[str]]:
    """(the name of the column for each kind of column that the task reads, notes on columns that it leaves out).

    TrainingError when a column that the job names is missing or not read, or when the first row has no set of columns
    which the task can read.
    """
    given, row, task, notes = spec.dataset.columns.model_dump(), rows[0], TASKS[spec.task], []
    every = {name for one in rows for name in one}
    for kind, column in given.items():
        if column is not None and column not in (every if kind in task.beside else row):
            text = f"dataset.columns.{kind}: there is no column {column!r}; there are: {listed(row)}"
            raise TrainingError(text)
    columns = task.columns_in(given, row, every)
    if columns is None:
        raise TrainingError(task.lacking(given, row) or "")
    for kind, of in task.beside.items():
        if given[kind] is not None and kind not in columns:
            raise TrainingError(
                f"dataset.columns.{kind} goes with {of}, and the data was read as {' and '.join(columns)}"
            )
        values = [row.get(columns[kind]) for row in rows] if kind in columns and given[kind] is None else []
        if reason := unfit(task, kind, values):
            notes.append(f"Column {columns.pop(kind)!r} was not read as {kind}: {reason}.")
    return columns, notes
