"""Sequence classification: one of a few classes for each text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from training.errors import TrainingError
from training.reading import texts_of
from training.recipe import Recipe
from training.samples import Batch, Sample, Samples, sample_of


def encode(rows: list[dict[str, Any]], tokenizer: Any, recipe: Recipe) -> list[Sample]:
    """Token ids with the tokenizer's special tokens, and the class's number."""
    texts = texts_of(rows, recipe.columns["text"], recipe)
    ids = tokenizer(texts, truncation=True, max_length=recipe.max_length)["input_ids"]
    return [
        sample_of(one, [class_of(row[recipe.columns["label"]], recipe)]) for one, row in zip(ids, rows, strict=True)
    ]


def class_of(label: Any, recipe: Recipe) -> int:
    """The number of a label's class."""
    if recipe.classes:
        if str(label) not in recipe.classes:
            raise TrainingError(f"the data has a label {label!r}, which is none of {', '.join(recipe.classes)}")
        return recipe.classes[str(label)]
    return int(label)


def loss_terms(sample: Sample) -> int:
    """How many terms of the loss a sample has: one."""
    del sample
    return 1


def model_class() -> Any:
    """The transformers class that loads a model for this task."""
    return AutoModelForSequenceClassification


def set_up(config: Any, splits: Sequence[Samples]) -> None:
    """Set what the model's configuration has to know about the data: that each text has one class, and how many."""
    config.num_labels = max(max(samples.labels) for samples in splits) + 1
    config.problem_type = "single_label_classification"  # a checkpoint may come from another kind, with another loss


def summed_loss(model: Any, batch: Batch, count: torch.Tensor) -> torch.Tensor:
    """The micro batch's share of the step's mean loss: its summed cross-entropy over the step's `count` samples."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return torch.nn.functional.cross_entropy(logits.float(), batch["labels"], reduction="sum") / count


def scored(output: Any, batch: Batch) -> tuple[float, int, int]:
    """(mean loss, classes guessed right, of how many); models compute their own loss in the format of their weights."""
    loss = torch.nn.functional.cross_entropy(output.logits.float(), batch["labels"])
    return float(loss), int((output.logits.argmax(-1) == batch["labels"]).sum()), len(batch["labels"])
