"""The tokenizer and the data of a run, from where they lie to the samples that are learnt."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from training.errors import TrainingError
from training.reading import Record, read_splits
from training.recipe import Recipe, task_of
from training.samples import Sample, Samples

ROWS_AT_ONCE = 1000  # to tokenise: a tokenizer's answer takes far more memory than its token ids


def tokenizer_of(source: str | Path, recipe: Recipe) -> Any:
    """The model's tokenizer, with a token to pad with; TrainingError where it has none that could be one."""
    tokenizer = AutoTokenizer.from_pretrained(source, **recipe.source_options)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        raise TrainingError("model.source: its tokenizer has neither a pad nor an end token")
    return tokenizer


def is_learnable(sample: Sample, recipe: Recipe) -> bool:
    """Whether a token or label of the sample counts for the loss."""
    return len(sample[0]) > 0 and task_of(recipe).loss_terms(sample) > 0


def locate(source: str, recipe: Recipe) -> Path:
    """The dataset's file or folder, downloaded from the hub if `source` is a hub id."""
    if recipe.dataset_is_local or Path(source).exists():
        return Path(source)
    from huggingface_hub import snapshot_download

    patterns = downloaded((*recipe.train_files, *recipe.validation_files), recipe.below, recipe.formats)
    options: dict[str, Any] = {"repo_type": "dataset", "revision": recipe.dataset_revision}
    return Path(snapshot_download(source, allow_patterns=patterns, **options))


def downloaded(files: Sequence[str], below: str, formats: Sequence[str]) -> list[str]:
    """What of a hub dataset is downloaded: the patterns of its files, or all of some formats in the folder `below`.

    The hub's patterns are those of fnmatch, in which * stands for folders too.
    """
    if files:
        return [pattern.replace("**/", "") for pattern in files]
    return [f"{below}/*{ending}" if below else f"*{ending}" for ending in formats]


def read_in_parts(source: str, recipe: Recipe) -> Iterator[list[tuple[bool, Record]]]:
    """The dataset's rows, each with whether it validates, few at a time: all of them would take much memory."""
    try:
        rows = read_splits(locate(source, recipe), recipe)
        while part := list(itertools.islice(rows, ROWS_AT_ONCE)):
            yield part
    except (OSError, ValueError) as error:
        raise TrainingError(f"{source} cannot be read in the form of the data that was measured: {error}") from error


def load_data(source: str, tokenizer: Any, recipe: Recipe) -> tuple[Samples, Samples]:
    """(training samples, validation samples), without samples that have no term of the loss."""
    splits, counts = (Samples(), Samples()), [0, 0]
    for part in read_in_parts(source, recipe):
        for validates in (False, True):
            rows = [row for its, row in part if its == validates]
            if not rows:
                continue  # tokenizers take no empty list
            for number, row in enumerate(rows, start=counts[validates] + 1):
                if missing := sorted(set(recipe.needed) - row.keys()):
                    raise TrainingError(f"row {number} has no column {', '.join(missing)}; it has {', '.join(row)}")
            counts[validates] += len(rows)
            for sample in task_of(recipe).encode(rows, tokenizer, recipe):
                if is_learnable(sample, recipe):
                    splits[validates].append(sample)
    train, held_out = splits
    if not counts[0] or (recipe.validation_split and not counts[1]):
        raise TrainingError("the dataset has no rows to train on, or none to validate with")
    if not train:
        raise TrainingError("the dataset has no row with anything to learn from within max_length")
    return train, held_out or Samples(train[:1])
