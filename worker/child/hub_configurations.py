"""The configurations of a dataset as its card declares them, of which `datasets.load_dataset` takes one as `name`.

A hub dataset may hold several sets of rows side by side, such as a corpus in ten languages, or the same questions with
two kinds of answers. The YAML at the head of its README.md says which files belong to which (hub docs, "Manual
Configuration"). To read all of a repository's files would train on all of them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.contract.job import DatasetSpec
from training.errors import TrainingError

CARD = "README.md"
NAMED = 20  # configurations that a sentence names
Files = dict[str, tuple[str, ...]]  # split -> patterns of its files; the empty name where files' names say which


def files_of_configuration(folder: Path, dataset: DatasetSpec) -> tuple[str, Files]:
    """(the configuration's name, its files by split) of a dataset in a folder; neither where it declares none.

    Without a card a configuration that the job names is a folder, as in the hub's revision refs/convert/parquet.
    TrainingError where the job has to name one, or names one that is not there, and where a split is none of its own.
    """
    declared = _declared(folder)
    if not declared:
        return (dataset.config, {"": (f"{dataset.config}/**/*",)}) if dataset.config else ("", {})
    only = next(iter(declared)) if len(declared) == 1 else "default"
    name = dataset.config or only
    if name not in declared:
        what = f"{name!r} is none of its" if dataset.config else "it has several"
        shown = ", ".join([*declared][:NAMED]) + (f" and {len(declared) - NAMED} more" if len(declared) > NAMED else "")
        raise TrainingError(f"dataset.config: {dataset.source}: {what} configurations, name one of these: {shown}")
    files, splits = declared[name], dataset.splits
    for field, split in (("train", splits.train), ("validation", splits.validation)):
        if split is not None and splits.column is None and "" not in files and split not in files:
            there = ", ".join(files)
            raise TrainingError(f"dataset.splits.{field}: {dataset.source} has no split {split!r}; it has {there}")
    return name, files


def patterns_of(files: Files, dataset: DatasetSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(patterns of the files that train, of those that validate); all files train where a column tells the splits."""
    splits = dataset.splits
    if splits.column is not None:
        return tuple(one for patterns in files.values() for one in patterns), ()

    def of(split: str | None) -> tuple[str, ...]:
        if split is None or "" not in files:
            return files[split] if split else ()
        return tuple(f"{one}{split}{rest}" for one in files[""] for rest in ("*", "*/**/*"))

    return of(splits.train), of(splits.validation)


def _declared(folder: Path) -> dict[str, Files]:
    """Configuration -> its files, as far as the dataset's card declares any; the card's default is called default."""
    from huggingface_hub import metadata_load

    try:
        data = metadata_load(folder / CARD) if (folder / CARD).is_file() else None
    except Exception:  # noqa: BLE001 - a card that cannot be read declares nothing
        data = None
    entries = (data or {}).get("configs")
    found: dict[str, Files] = {}
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and (files := _files(entry)):
            name = str(entry.get("config_name", "default"))
            found[name] = files
            if entry.get("default") is True:
                found.setdefault("default", files)
    return found


def _files(entry: Mapping[str, Any]) -> Files:
    """The files of a configuration by split."""
    given, below = entry.get("data_files"), str(entry.get("data_dir") or "").strip("/")
    prefix = f"{below}/" if below else ""
    if given is None:
        return {"": (f"{prefix}**/*",)} if below else {}
    if isinstance(given, str) or (isinstance(given, list) and all(isinstance(one, str) for one in given)):
        return {"train": _patterns(given, prefix)}
    if isinstance(given, dict):
        return {str(split): _patterns(paths, prefix) for split, paths in given.items()}
    return {str(one["split"]): _patterns(one["path"], prefix) for one in given if {"split", "path"} <= one.keys()}


def _patterns(given: Any, prefix: str) -> tuple[str, ...]:
    """Patterns for Path.glob."""
    return tuple(prefix + str(one).removeprefix("./") for one in ([given] if isinstance(given, str) else given))
