"""Sequence classification: one of a few classes for each text."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from training.recipe import Recipe
from training.samples import Batch, Sample, sample_of


def encode(rows: list[dict[str, Any]], tokenizer: Any, recipe: Recipe) -> list[Sample]:
    """Token ids with the tokenizer's special tokens, and the class's number."""
    texts = [row[recipe.columns["text"]] for row in rows]
    ids = tokenizer(texts, truncation=True, max_length=recipe.max_length)["input_ids"]
    return [sample_of(one, [int(row[recipe.columns["label"]])]) for one, row in zip(ids, rows, strict=True)]


def loss_terms(sample: Sample) -> int:
    """How many terms of the loss a sample has: one."""
    del sample
    return 1


def model_class() -> Any:
    """The transformers class that loads a model for this task."""
    return AutoModelForSequenceClassification


def set_up(config: Any, samples: list[Sample]) -> None:
    """Set what the model's configuration has to know about the data: the number of classes."""
    config.num_labels = max(number for _, (number,) in samples) + 1


def summed_loss(model: Any, batch: Batch, count: torch.Tensor) -> torch.Tensor:
    """The micro batch's share of the step's mean loss: its summed cross-entropy over the step's `count` samples."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return torch.nn.functional.cross_entropy(logits.float(), batch["labels"], reduction="sum") / count


def right_guesses(output: Any, batch: Batch) -> tuple[int, int]:
    """(classes guessed right, of how many)."""
    return int((output.logits.argmax(-1) == batch["labels"]).sum()), len(batch["labels"])
