"""Evaluation: the mean loss, the share of right predictions, and the scores of generated completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from training.batches import collate, moved
from training.recipe import Recipe, apply, task_of
from training.samples import Batch, Sample
from training.step import autocast


@torch.no_grad()  # type: ignore[untyped-decorator]
def evaluate(
    model: Any, samples: Sequence[Sample], tokenizer: Any, device: torch.device, recipe: Recipe
) -> dict[str, float]:
    """`loss`, `accuracy`, and the scores of generated completions where the recipe generates; dropout is off."""
    model.eval()
    if recipe.evaluation is None:
        scores = guesses(model, samples, tokenizer.pad_token_id, device, recipe)
    else:
        with apply(recipe.evaluation, model) as score:
            scores = guesses(model, samples, tokenizer.pad_token_id, device, recipe)
            if score:
                with autocast(device, recipe):
                    scores |= score(samples, recipe.evaluation_batch_size, recipe.max_length, tokenizer)
    model.train()
    return scores


def output_of(model: Any, batch: Batch, recipe: Recipe) -> Any:
    """The model's output for a batch of an evaluation."""
    if not recipe.evaluates_eagerly:
        return model(**batch)
    with torch.compiler.set_stance("force_eager"):
        return model(**batch)


def guesses(model: Any, samples: Sequence[Sample], pad: int, device: torch.device, recipe: Recipe) -> dict[str, float]:
    """`loss` and `accuracy` over padded batches, the longest samples first."""
    ordered = sorted(range(len(samples)), key=lambda at: len(samples[at][0]), reverse=True)
    total, terms, right, guessed = 0.0, 0, 0, 0
    for start in range(0, len(ordered), recipe.evaluation_batch_size):
        part = [samples[at] for at in ordered[start : start + recipe.evaluation_batch_size]]
        batch = moved(collate([[sample] for sample in part], pad, recipe), device, recipe)
        with autocast(device, recipe):
            output = output_of(model, batch, recipe)
        count, (mean, hits, of) = sum(map(task_of(recipe).loss_terms, part)), task_of(recipe).scored(output, batch)
        total, terms = total + mean * count, terms + count
        right, guessed = right + hits, guessed + of
        del output, batch  # or its logits would still be held while the next batch's are made
    return {"loss": total / max(1, terms), "accuracy": right / max(1, guessed)}
