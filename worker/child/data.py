"""The job's samples: tokenised once, cached for every later trial, and the fixed work unit drawn from them."""

from __future__ import annotations

import hashlib
import os
import random
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from service.contract.job import JobSpec
from service.contract.measurement import DatasetFacts
from service.exports.templates.common import Sample
from worker.child.problem import JobProblem
from worker.child.rows import read_splits
from worker.tasks.base import Task

HISTOGRAM_EDGES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 1 << 30)


@dataclass(frozen=True)
class Data:
    """Training and validation samples with their lengths in tokens."""

    train: list[Sample]
    validation: list[Sample]
    lengths: list[int]
    facts: DatasetFacts


def load(spec: JobSpec, task: Task, tokenizer: Any, source: Path, cache: Path | None) -> Data:
    """The job's data, from the cache when an earlier trial of the job has filled it."""
    file = cache / "tokens.npz" if cache else None
    if file and file.exists():
        os.utime(file.parent)  # still in use: see worker/runner/pruning.py
        return _unpack(file)
    train_rows, validation_rows = read_splits(spec.dataset, source)
    columns = task.columns(spec.dataset.columns, train_rows[0])
    length, loss_on = spec.dataset.max_length, spec.training.loss_on
    try:
        train = task.encode(train_rows, columns, tokenizer, length, loss_on)
        validation = task.encode(validation_rows, columns, tokenizer, length, loss_on)
    except KeyError as error:
        raise JobProblem(f"dataset: some rows lack the column {error}") from error
    kept = [sample for sample in train if sample[0] and task.items(sample) > 0]
    if not kept:
        raise JobProblem("dataset: no training row has anything to learn from within max_length")
    validation = [sample for sample in validation if sample[0] and task.items(sample) > 0] or kept[:1]
    data = Data(kept, validation, [len(ids) for ids, _ in kept], _facts(kept, validation, length))
    if file:
        _pack(file, data)
    return data


def _facts(train: list[Sample], validation: list[Sample], max_length: int) -> DatasetFacts:
    lengths = np.array([len(ids) for ids, _ in train])
    digest = hashlib.sha256()
    for ids, labels in train:
        digest.update(np.array([*ids, -1, *labels], dtype=np.int32).tobytes())
    p50, p90, p99 = (int(value) for value in np.percentile(lengths, (50, 90, 99)))
    histogram, low = {}, 0
    for edge in HISTOGRAM_EDGES:
        count = int(((lengths > low) & (lengths <= edge)).sum())
        if count:
            histogram[str(edge)] = count
        low = edge
    return DatasetFacts(
        fingerprint=digest.hexdigest()[:16],
        rows=len(train),
        validation_rows=len(validation),
        tokens=int(lengths.sum()),
        at_max_length=int((lengths >= max_length).sum()),
        p50=p50,
        p90=p90,
        p99=p99,
        longest=int(lengths.max()),
        histogram=histogram,
    )


def _flat(lists: list[array[int]]) -> tuple[np.ndarray, np.ndarray]:
    joined = np.concatenate([np.frombuffer(one, dtype=np.int64) for one in lists])
    return joined.astype(np.int32), np.cumsum([len(one) for one in lists])


def _pack(file: Path, data: Data) -> None:
    """Write to a name of our own and rename, so that another trial never reads half a file."""
    arrays: dict[str, Any] = {"facts": data.facts.model_dump_json()}
    for name, samples in (("train", data.train), ("validation", data.validation)):
        for part, index in (("ids", 0), ("labels", 1)):
            arrays[f"{name}_{part}"], arrays[f"{name}_{part}_ends"] = _flat([sample[index] for sample in samples])
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{os.getpid()}.npz")
    np.savez(partial, **arrays)
    partial.rename(file)


def _unpack(file: Path) -> Data:
    with np.load(file) as arrays:
        facts = DatasetFacts.model_validate_json(str(arrays["facts"]))
        parts = {
            name: [array("q", one.tobytes()) for one in np.split(arrays[name].astype(np.int64), ends[:-1])]
            for name in ("train_ids", "train_labels", "validation_ids", "validation_labels")
            for ends in (arrays[f"{name}_ends"],)
        }
    train = list(zip(parts["train_ids"], parts["train_labels"], strict=True))
    validation = list(zip(parts["validation_ids"], parts["validation_labels"], strict=True))
    return Data(train, validation, [len(ids) for ids, _ in train], facts)


def work_unit(lengths: list[int], size: int, seed: int) -> list[int]:
    """Indices of `size` samples whose lengths are spread as the dataset's are, in random order.

    Stratified: the samples sorted by length, one drawn from each of `size` equal slices, so that a small unit
    stands for the whole. The same seed gives the same unit.
    """
    rng = random.Random(seed)
    by_length = sorted(range(len(lengths)), key=lambda one: (lengths[one], one))
    size = min(size, len(by_length))
    edges = [round(at * len(by_length) / size) for at in range(size + 1)]
    unit = [by_length[rng.randrange(low, high)] for low, high in zip(edges, edges[1:], strict=False)]
    rng.shuffle(unit)
    return unit
