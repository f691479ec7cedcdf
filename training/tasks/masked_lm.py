"""Masked language modelling: predict a text's masked tokens from the tokens on both sides (Devlin et al. 2018)."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForMaskedLM

from training.errors import TrainingError
from training.reading import texts_of
from training.recipe import Recipe
from training.samples import IGNORED, Batch, Sample, Samples, sample_of

SHARE = 0.15  # the share of a text's tokens that are to be predicted, as in BERT


def encode(rows: list[dict[str, Any]], tokenizer: Any, recipe: Recipe) -> list[Sample]:
    """Token ids, some of them masked, and labels that are IGNORED everywhere else."""
    if tokenizer.mask_token_id is None:
        raise TrainingError("model.source: its tokenizer has no mask token, so it cannot be trained on masked-lm")
    texts = texts_of(rows, recipe.columns["text"], recipe)
    return [
        masked(ids, tokenizer) for ids in tokenizer(texts, truncation=True, max_length=recipe.max_length)["input_ids"]
    ]


def masked(ids: list[int], tokenizer: Any) -> Sample:
    """At least one token is to be predicted. Of 10 such tokens, 8 are masked, 1 is replaced by another, 1 stays.

    Special tokens are left alone. The choice depends on the sample's tokens only, so every run, configuration and
    epoch predicts the same tokens.
    """
    special = set(tokenizer.all_special_ids)
    candidates = [at for at, one in enumerate(ids) if one not in special]
    shown, labels = list(ids), [IGNORED] * len(ids)
    rng = random.Random(zlib.crc32(repr(ids).encode()))
    for at in rng.sample(candidates, max(1, round(SHARE * len(candidates))) if candidates else 0):
        labels[at] = ids[at]
        luck = rng.random()
        if luck < 0.8:
            shown[at] = tokenizer.mask_token_id
        elif luck < 0.9:
            shown[at] = rng.randrange(tokenizer.vocab_size)
    return sample_of(shown, labels)


def loss_terms(sample: Sample) -> int:
    """How many terms of the loss a sample has: the number of tokens that are to be predicted."""
    return sum(label != IGNORED for label in sample[1])


def model_class() -> Any:
    """The transformers class that loads a model for this task."""
    return AutoModelForMaskedLM


def set_up(config: Any, splits: Sequence[Samples]) -> None:
    """Nothing: for this task, the model's configuration does not depend on the data."""


def summed_loss(model: Any, batch: Batch, count: torch.Tensor) -> torch.Tensor:
    """The micro batch's share of the step's mean loss: its summed cross-entropy over the step's `count` terms."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return cross_entropy(logits, batch, "sum") / count


def cross_entropy(logits: torch.Tensor, batch: Batch, reduction: str) -> torch.Tensor:
    """The loss of the tokens to predict, in fp32: models compute their own in the format of their weights."""
    flat = logits.float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(flat, batch["labels"].flatten(), reduction=reduction)


def scored(output: Any, batch: Batch) -> tuple[float, int, int]:
    """(mean loss, masked tokens guessed right, of how many)."""
    hits = (output.logits.argmax(-1) == batch["labels"]) & (batch["labels"] != IGNORED)
    loss = cross_entropy(output.logits, batch, "mean")
    return float(loss), int(hits.sum()), int((batch["labels"] != IGNORED).sum())
