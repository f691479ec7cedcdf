"""The tokenizer and the data of a run, from where they lie to the samples that are learnt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from training.errors import TrainingError
from training.reading import read_splits
from training.recipe import Recipe, task_of
from training.samples import Sample

ROWS_AT_ONCE = 1000  # to tokenise


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


def samples_of(rows: list[dict[str, Any]], tokenizer: Any, recipe: Recipe) -> list[Sample]:
    """The rows' samples, few rows at a time: a tokenizer's answer takes far more memory than its token ids."""
    parts = [rows[at : at + ROWS_AT_ONCE] for at in range(0, len(rows), ROWS_AT_ONCE)]
    return [sample for part in parts for sample in task_of(recipe).encode(part, tokenizer, recipe)]


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


def load_data(source: str, tokenizer: Any, recipe: Recipe) -> tuple[list[Sample], list[Sample]]:
    """(training samples, validation samples), without samples that have no term of the loss."""
    parts = []
    try:
        splits = read_splits(locate(source, recipe), recipe)
    except (OSError, ValueError) as error:
        raise TrainingError(f"{source} cannot be read in the form of the data that was measured: {error}") from error
    for rows in splits:
        if not rows:
            raise TrainingError("the dataset has no rows to train on, or none to validate with")
        for number, row in enumerate(rows, start=1):
            if missing := sorted(set(recipe.needed) - row.keys()):
                raise TrainingError(f"row {number} has no column {', '.join(missing)}; it has {', '.join(row)}")
        parts.append([sample for sample in samples_of(rows, tokenizer, recipe) if is_learnable(sample, recipe)])
    if not parts[0]:
        raise TrainingError("the dataset has no row with anything to learn from within max_length")
    return parts[0], parts[1] or parts[0][:1]
