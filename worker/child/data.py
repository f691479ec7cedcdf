"""The job's samples, tokenised by its first trial and cached for the later ones, and the work unit drawn from them.

The work unit is the fixed set of samples that every trial of the job is timed on.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateSyntaxError

from service.contract.child import Workplace
from service.contract.form import DataForm
from service.contract.job import JobSpec
from service.contract.measurement import DatasetFacts
from service.text import counted, told_in_short
from training.errors import TrainingError
from training.reading import Record
from training.recipe import Recipe, task_of
from training.samples import IGNORED, Sample, Samples
from training.source import ROWS_AT_ONCE, is_learnable
from worker.child import sources
from worker.child.rows import read_rows
from worker.child.sampling import sampled

# Upper bounds, in tokens, of the bins of the histogram of lengths.
HISTOGRAM_EDGES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 1 << 30)
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a pair that UTF-16 writes one character with
KEPT = "data.npz"  # the file of a job's samples in its cache
PARTS = ("ids", "labels", "ids_end", "labels_end")  # of a split in that file
WORTH_A_NOTE = 0.05  # share of training samples that fill max_length, from which on a note says so
# Bytes that a run holds for each row beside its tokens (where it ends, its length, its place in an epoch's steps), and
# for each step. tests/child/test_sampling.py measures both.
ROW_BYTES, STEP_BYTES = 250, 200
GROWTH = 17 / 16  # of an array's size, by which it grows when it is full
DRAWS = 200  # of a work unit, of which the most typical one is taken


@dataclass(frozen=True)
class Data:
    """Training and validation samples with the training samples' lengths in tokens.

    `drawn` says how many of each, from the first on, stand for the dataset. Of a large dataset, those after them are
    there for what only few rows show, such as the greatest length.
    """

    train: Samples
    validation: Samples
    lengths: list[int]
    facts: DatasetFacts
    drawn: tuple[int, int]

    @property
    def typical(self) -> list[int]:
        """The lengths of the training samples that stand for the dataset."""
        return self.lengths[: self.drawn[0]]

    def unread_bytes(self, effective: int) -> int:
        """Bytes of host memory that a run takes for rows which no trial reads, in steps of `effective` rows."""
        facts, total = self.facts, 0.0
        splits = ((self.train, facts.rows, self.drawn[0]), (self.validation, facts.validation_rows, self.drawn[1]))
        for samples, rows, drawn in splits:
            tokens = samples.ids.itemsize * sum(ends[drawn] for ends in samples.ends) * GROWTH
            total += (rows / drawn - 1) * (tokens + drawn * (ROW_BYTES + STEP_BYTES / effective))
        return max(0, round(total))

    @cached_property
    def most_learnt(self) -> tuple[int, float]:
        """(the most tokens that are learnt of a training sample, the largest share of a training sample's tokens)."""
        counts = [len(labels) - labels.count(IGNORED) for _, labels in self.train]
        shares = (count / len(labels) for count, (_, labels) in zip(counts, self.train, strict=True))
        return max(counts), max(shares)


def is_kept(workplace: Workplace) -> bool:
    """Whether an earlier process of the job has kept its data."""
    return workplace.job_cache is not None and (workplace.job_cache / KEPT).exists()


def load(spec: JobSpec, recipe: Recipe, tokenizer: Any, workplace: Workplace) -> Data:
    """The job's data, from the job's cache when an earlier trial has filled it; TrainingError for mistakes in it."""
    file = workplace.job_cache / KEPT if workplace.job_cache else None
    if file and file.exists():
        os.utime(file.parent)  # marks the cache as in use, so that worker/runner/pruning.py does not delete it
        return _unpack(file)
    train_rows, validation_rows, recipe, notes = _rows(spec, recipe, workplace)
    notes += _template_notes(train_rows, tokenizer, recipe, spec)
    train = _read(train_rows, "training", tokenizer, recipe)
    validation = _read(validation_rows, "validation", tokenizer, recipe)
    if not train.drawn:
        raise TrainingError(f"dataset: no training row has anything to learn: {train.notes[-1].rstrip('.')}")
    notes += train.notes + validation.notes
    if not validation.drawn or validation_rows[0] is train_rows[0]:
        notes.append("No validation row is left, so the evaluation takes a row that is trained on.")
    notes += _cut(train.drawn, recipe) + _small(train.drawn, spec)
    if not validation.drawn:
        validation = replace(validation, drawn=Samples(train.drawn[:1]), every=1.0)
    samples, held_out = (Samples(chain(split.drawn, split.others)) for split in (train, validation))
    lengths, drawn = [len(ids) for ids, _ in samples], (len(train.drawn), len(validation.drawn))
    data = Data(samples, held_out, lengths, _facts(train, validation, recipe, notes), drawn)
    if file:
        _pack(file, data)
    return data


def _rows(spec: JobSpec, recipe: Recipe, workplace: Workplace) -> tuple[list[Record], list[Record], Recipe, list[str]]:
    """(training rows, validation rows, the recipe with what reading them told of the dataset, notes for the user)."""
    path, chosen = sources.dataset_files(spec.dataset, workplace)
    train_files, validation_files = chosen.of_splits(spec.dataset.splits)
    recipe = replace(
        recipe,
        chat_template=sources.chat_template(spec.dataset, workplace),
        dataset_is_local=sources.local(spec.dataset.source, workplace).exists(),
        dataset_revision=sources.commit_of(path),
        below=chosen.below,
        train_files=train_files,
        validation_files=validation_files,
    )
    train_rows, validation_rows, recipe, notes = read_rows(spec, recipe, path)
    if chosen.name and spec.dataset.config is None:
        notes.append(f"Of the dataset its configuration {chosen.name!r} was read (dataset.config).")
    return train_rows, validation_rows, recipe, notes


def _template_notes(rows: list[Record], tokenizer: Any, recipe: Recipe, spec: JobSpec) -> list[str]:
    """Notes on what the chat template leaves out; TrainingError where there are conversations and no template."""
    if "messages" in recipe.columns and not (recipe.chat_template or tokenizer.chat_template):
        raise TrainingError(
            f"dataset.columns.messages: the tokenizer of {spec.model.source} has no chat template; "
            "dataset.chat_template can bring one: its text, a .jinja file, or chatml"
        )
    template, notes = recipe.chat_template or str(tokenizer.chat_template), []
    if "tools" in recipe.columns and "tools" not in template:
        notes.append("The chat template says nothing of tools, so it leaves them out.")
    if (
        "messages" in recipe.columns
        and "tool_calls" not in template
        and any(_calls(row[recipe.columns["messages"]]) for row in rows)
    ):
        notes.append("The chat template says nothing of tool_calls, so calls of tools are neither written nor learnt.")
    return notes


@dataclass(frozen=True)
class Split:
    """A split's samples: those drawn, which each stand for `every` rows, and others (worker/child/sampling.py).

    `rows` says how many rows were tokenised; None for all.
    """

    drawn: Samples
    others: Samples
    every: float
    rows: int | None
    notes: list[str]


def _read(rows: list[Record], part: str, tokenizer: Any, recipe: Recipe) -> Split:
    """The samples of a split's rows, or of a sample of them where there are many."""
    try:
        read = sampled(rows, recipe)
        with _all_cores():
            drawn, note = _learnable(read.drawn, part, tokenizer, recipe)
            others, _ = _learnable(read.others, part, tokenizer, recipe)
    except TrainingError as error:
        _blame_template(error, recipe)
        raise
    except (TypeError, UnicodeEncodeError):  # raised for text that cannot be written as UTF-8
        _check_surrogates(rows, part, recipe)
        raise
    notes, count = [note] if note else [], len(read.drawn)
    if count == len(rows):
        return Split(drawn, others, 1.0, None, notes)
    told = f"Of {len(rows)} {part} rows a sample of {count} was tokenised and measured; numbers of rows and tokens are "
    return Split(drawn, others, len(rows) / count, count, [f"{told}estimates for all, which the run reads.", *notes])


def _blame_template(error: TrainingError, recipe: Recipe) -> None:
    """TrainingError that names the chat template, and not a conversation, where the mistake is in its syntax."""
    if isinstance(mistake := error.__cause__, TemplateSyntaxError):
        which = "dataset.chat_template: it" if recipe.chat_template else "model.source: its tokenizer's chat template"
        told = f"{which} is not written as Jinja asks for: {told_in_short(mistake.message)} (line {mistake.lineno})"
        raise TrainingError(told) from error


@contextmanager
def _all_cores() -> Iterator[None]:
    """Have tokenizers use all cores. Elsewhere in a trial they use one, as data loaders are forked from it."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def samples_of(rows: list[Record], tokenizer: Any, recipe: Recipe) -> Iterator[Sample]:
    """The rows' samples, tokenised few rows at a time."""
    for at in range(0, len(rows), ROWS_AT_ONCE):
        yield from task_of(recipe).encode(rows[at : at + ROWS_AT_ONCE], tokenizer, recipe)


def _learnable(rows: list[Record], part: str, tokenizer: Any, recipe: Recipe) -> tuple[Samples, str]:
    """(the rows' samples in which a token or label counts for the loss, a sentence on the others if there are any)."""
    kept, left_out = Samples(), []
    for sample in samples_of(rows, tokenizer, recipe):
        if is_learnable(sample, recipe):
            kept.append(sample)
        else:
            left_out.append(len(sample[0]))
    cut = sum(length >= recipe.max_length for length in left_out)
    reasons = []
    if cut:
        limit = f"max_length ({recipe.max_length} tokens)"
        reasons.append(f"in {cut}, what is learnt begins beyond {limit}, which dataset.max_length can raise")
    if len(left_out) > cut:
        nothing = (
            "a conversation without a turn of the assistant, or with weight 0 alone"
            if "messages" in recipe.columns
            else "an empty completion"
        )
        reasons.append(f"{len(left_out) - cut} hold nothing to learn, such as {nothing}")
    note = f"{len(left_out)} of {len(rows)} {part} rows were left out: {'; '.join(reasons)}." if left_out else ""
    return kept, note


def _calls(conversation: Any) -> bool:
    """Whether a turn of a conversation calls tools."""
    turns = conversation if isinstance(conversation, list) else ()
    return any(isinstance(turn, dict) and turn.get("tool_calls") for turn in turns)


def _cut(train: Samples, recipe: Recipe) -> list[str]:
    """A note where much of the data may be cut."""
    full = sum(len(ids) >= recipe.max_length for ids, _ in train)
    if full < WORTH_A_NOTE * len(train):
        return []
    return [
        f"{full} of {len(train)} training samples fill max_length ({recipe.max_length} tokens); what goes beyond it is "
        "not trained on, and dataset.max_length can raise it."
    ]


def _small(train: Samples, spec: JobSpec) -> list[str]:
    """A note where the effective batch is larger than the data."""
    size = spec.training.effective_batch_size
    if size is None or size <= len(train):
        return []
    there = counted(len(train), "training sample", "training samples")
    be = "is" if len(train) == 1 else "are"
    return [f"training.effective_batch_size is {size}, and there {be} {there}, so that an epoch is one step of all."]


def _check_surrogates(rows: list[Record], part: str, recipe: Recipe) -> None:
    """TrainingError for the first text that has half of a surrogate pair, such as a lone \\ud800 in JSON."""
    for number, row in enumerate(rows, start=1):
        for column in recipe.columns.values():
            if SURROGATE.search(json.dumps(row.get(column), ensure_ascii=False, default=str)):
                where = f"dataset: the column {column!r} of {part} row {number}"
                raise TrainingError(f"{where} has half of a surrogate pair (\\ud800 to \\udfff), which is no character")


def _facts(train: Split, validation: Split, recipe: Recipe, notes: list[str]) -> DatasetFacts:
    """The facts about the data that the user is shown, and those that the training code's recipe needs."""
    lengths = np.array([len(ids) for ids, _ in train.drawn])
    digest = hashlib.sha256()
    for ids, labels in train.drawn:
        digest.update(np.array([*ids, -1, *labels], dtype=np.int32).tobytes())
    p50, p90, p99 = (int(value) for value in np.percentile(lengths, (50, 90, 99)))
    histogram, low = {}, 0
    for edge in HISTOGRAM_EDGES:
        count = int(((lengths > low) & (lengths <= edge)).sum())
        if count:
            histogram[str(edge)] = round(train.every * count)
        low = edge
    return DatasetFacts(
        fingerprint=digest.hexdigest()[:16],
        rows=round(train.every * len(train.drawn)),
        validation_rows=round(validation.every * len(validation.drawn)),
        tokens=round(train.every * int(lengths.sum())),
        at_max_length=round(train.every * int((lengths >= recipe.max_length).sum())),
        sampled_rows=train.rows,
        p50=p50,
        p90=p90,
        p99=p99,
        longest=max(len(ids) for ids, _ in chain(train.drawn, train.others)),
        histogram=histogram,
        columns=dict(recipe.columns),
        formats=recipe.formats,
        is_folder=recipe.dataset_is_folder,
        is_local=recipe.dataset_is_local,
        revision=recipe.dataset_revision,
        form=DataForm(**{name: getattr(recipe, name) for name in DataForm.model_fields}),
        notes=tuple(notes),
    )


def _pack(file: Path, data: Data) -> None:
    """Write to a file named after this process and rename it, so that another trial never reads half a file."""
    arrays: dict[str, Any] = {"facts": data.facts.model_dump_json(), "drawn": np.array(data.drawn)}
    for name, samples in (("train", data.train), ("validation", data.validation)):
        parts = (samples.ids, samples.labels, *samples.ends)
        arrays |= {f"{name}_{part}": np.asarray(values) for part, values in zip(PARTS, parts, strict=True)}
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{os.getpid()}.npz")
    np.savez(partial, **arrays)
    partial.rename(file)


def _unpack(file: Path) -> Data:
    with np.load(file) as arrays:
        facts = DatasetFacts.model_validate_json(str(arrays["facts"]))
        drawn = tuple(map(int, arrays["drawn"]))
        train, validation = Samples(), Samples()
        for name, samples in (("train", train), ("validation", validation)):
            parts = (samples.ids, samples.labels, *samples.ends)
            for part, values in zip(PARTS, parts, strict=True):
                values[:] = array(values.typecode, arrays[f"{name}_{part}"].tobytes())
    return Data(train, validation, [len(ids) for ids, _ in train], facts, (drawn[0], drawn[1]))


def work_unit(lengths: list[int], size: int, seed: int, effective: int) -> list[int]:
    """Indices of `size` samples that stand for the whole dataset, in random order. The same seed gives the same unit.

    Stratified: the samples sorted by length, one drawn from each of `size` equal slices. Of DRAWS such units in random
    order, the one is taken whose micro batches, of every size that divides the effective batch, are padded most nearly
    as the dataset's are on average. Otherwise luck decides which samples share a micro batch: in units of 48 of the
    demo's samples, micro batches of 8 had 8% fewer to 11% more tokens than in the dataset, padding included.
    """
    rng = random.Random(seed)
    by_length = sorted(range(len(lengths)), key=lambda one: (lengths[one], one))
    size = min(size, len(by_length))
    edges = [round(at * len(by_length) / size) for at in range(size + 1)]
    ascending = np.array([lengths[one] for one in by_length], dtype=float)
    micro_sizes = [count for count in range(1, min(size, effective) + 1) if effective % count == 0]
    wanted = {count: _longest_expected(ascending, count) for count in micro_sizes}
    units = []
    for _ in range(DRAWS):
        units.append([rng.randrange(low, high) for low, high in zip(edges, edges[1:], strict=False)])
        rng.shuffle(units[-1])
    best = min(units, key=lambda unit: _distance(ascending[unit], wanted))
    return [by_length[rank] for rank in best]


def _longest_expected(ascending: np.ndarray, count: int) -> tuple[float, float]:
    """The means of the longest of `count` samples drawn without replacement, and of its square."""
    ranks = np.arange(len(ascending), count - 1, -1)  # from the longest sample down to the shortest that can be it
    fewer = np.concatenate([[1.0], (ranks[:-1] - count) / (ranks[:-1] - 1.0)])
    chances = np.cumprod(fewer) * count / len(ascending)
    longest = ascending[ranks - 1]
    return float(chances @ longest), float(chances @ longest**2)


def _distance(unit: np.ndarray, wanted: dict[int, tuple[float, float]]) -> float:
    """How far the padded lengths of the unit's micro batches, and their squares, are from the wanted means."""
    distance = 0.0
    for count, means in wanted.items():
        longest = unit[: len(unit) // count * count].reshape(-1, count).max(1)
        found = longest.mean(), (longest**2).mean()
        distance += sum(math.log(one / mean) ** 2 for one, mean in zip(found, means, strict=True))
    return distance
