"""The configurations of a dataset as its card declares them, of which `datasets.load_dataset` takes one as `name`.

A hub dataset may hold several sets of rows side by side, such as a corpus in ten languages, or the same questions with
two kinds of answers. The YAML at the head of its README.md says which files belong to which (hub docs, "Manual
Configuration"). To read all of a repository's files would train on all of them together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from service.contract.job import DatasetSpec, Splits
from service.text import listed
from training.errors import TrainingError

CARD = "README.md"


@dataclass(frozen=True)
class HubConfiguration:
    """A set of rows of a dataset: patterns of its files by split, or a folder whose files' names tell the splits."""

    name: str = ""
    below: str = ""
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def of_splits(self, splits: Splits) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(patterns of the files that train, of those that validate); all train where a column tells the splits."""
        if splits.column is not None:
            return tuple(one for patterns in self.files.values() for one in patterns), ()
        return self.files.get(splits.train, ()), self.files.get(splits.validation or "", ())


def configuration_of(folder: Path, dataset: DatasetSpec) -> HubConfiguration:
    """The configuration of a dataset that is read; one without a name where it declares none.

    Without a card a configuration that the job names is a folder, as in the hub's revision refs/convert/parquet.
    TrainingError where the job has to name one, or names one that is not there; where it lacks a split that the job
    names; and where its files lie elsewhere.
    """
    if dataset.config is not None and folder.is_file():
        raise TrainingError(f"dataset.config: {dataset.source} is a file, which has no configurations; leave it out")
    declared = _declared(folder)
    if not declared:
        named = dataset.config or ""
        return HubConfiguration(named, _inside(named, dataset))
    only = next(iter(declared)) if len(declared) == 1 else "default"
    name = dataset.config or only
    if name not in declared:
        what = f"{name!r} is none of its" if dataset.config else "it has several"
        raise TrainingError(
            f"dataset.config: {dataset.source}: {what} configurations, name one of these: {listed(declared)}"
        )
    found, splits = declared[name], dataset.splits
    below = _inside(found.below.rstrip("/"), dataset)
    files = {
        split: tuple(_pattern(_inside(one, dataset), below) for one in each) for split, each in found.files.items()
    }
    for field_name, split in (("train", splits.train), ("validation", splits.validation)):
        if split is not None and splits.column is None and files and split not in files:
            there = ", ".join(files)
            raise TrainingError(f"dataset.splits.{field_name}: {dataset.source} has no split {split!r}; it has {there}")
    return HubConfiguration(name, "" if files else below, files)


def _declared(folder: Path) -> dict[str, HubConfiguration]:
    """Name -> configuration, as far as the dataset's card declares any; the card's default is called default."""
    from huggingface_hub import metadata_load

    try:
        data = metadata_load(folder / CARD) if (folder / CARD).is_file() else None
    except Exception:  # noqa: BLE001 - a card that cannot be read declares nothing
        data = None
    entries = data.get("configs") if isinstance(data, dict) else None
    found: dict[str, HubConfiguration] = {}
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and (files := _files(entry.get("data_files"))) is not None:
            name, below = str(entry.get("config_name") or "default"), str(entry.get("data_dir") or "")
            if files or below:
                found[name] = HubConfiguration(name, below, files)
                if entry.get("default") is True:
                    found.setdefault("default", found[name])
    return found


def _files(given: Any) -> dict[str, tuple[str, ...]] | None:
    """Split -> paths of a card's `data_files`; None for what is in no form that the hub knows."""
    if given is None:
        return {}
    if _is_paths(given):
        return {"train": _paths(given)}
    pairs = list(given.items()) if isinstance(given, dict) else []
    for one in given if isinstance(given, list) else []:
        pairs.append((one.get("split"), one.get("path")) if isinstance(one, dict) else (None, None))
    if not pairs or not all(isinstance(split, str) and _is_paths(paths) for split, paths in pairs):
        return None
    return {split: _paths(paths) for split, paths in pairs}


def _is_paths(given: Any) -> bool:
    every = given if isinstance(given, list) else [given]
    return bool(every) and all(isinstance(one, str) and one for one in every)


def _paths(given: Any) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _inside(path: str, dataset: DatasetSpec) -> str:
    """The path without a `.` part; TrainingError where it leads out of the dataset's folder, or to another place."""
    parts = path.split("/")
    if path.startswith("/") or ".." in parts or "://" in path or "\\" in path:
        raise TrainingError(f"dataset: {path[:200]!r} of {dataset.source} is not in its own folder, so it is not read")
    ends = ["**"] if path.endswith("/") else []
    return "/".join([*(one for one in parts if one not in ("", ".")), *ends])


def _pattern(path: str, below: str) -> str:
    """The path as a pattern for Path.glob, in which `**` is a part by itself and stands for folders alone."""
    parts = [part if part == "**" else re.sub(r"\*\*+", "*", part) for part in f"{below}/{path}".split("/") if part]
    return "/".join([*parts, *(["*"] if parts[-1] == "**" else [])])
