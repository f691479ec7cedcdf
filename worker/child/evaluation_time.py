"""How long an evaluation takes, measured where evaluations take a share of the run that counts."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from math import ceil

import torch

from service.contract.job import JobSpec
from service.contract.measurement import DatasetFacts
from service.contract.objective import evaluations
from training.batches import padded_width
from training.evaluation import guesses
from training.recipe import Recipe, apply
from training.samples import Sample
from worker.child.build import Bundle

LEAST_SHARE = 0.03  # evaluated samples over trained ones: some 1% of the run's seconds, without a backward pass
BATCHES = 4  # that are timed; all others are taken to be as fast a token


def counts(spec: JobSpec, facts: DatasetFacts, effective: int) -> bool:
    """Whether the run's evaluations take so much of it that a trial has to time them."""
    share = evaluations(spec, facts.rows, effective) * facts.validation_rows / (spec.training.epochs * facts.rows)
    return share >= LEAST_SHARE


def evaluation_seconds(bundle: Bundle, size: int) -> float:
    """The seconds of one evaluation of all validation samples, `size` at a time, without generation.

    Some of its batches are timed, which are spread evenly over all lengths, after a first one that warms up. The model
    is not compiled yet. A run evaluates the compiled one, which may be faster, and compiles for that: neither counts.
    """
    ordered = sorted(bundle.data.validation[: bundle.data.drawn[1]], key=lambda sample: len(sample[0]), reverse=True)
    batches = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    step = ceil(len(batches) / BATCHES)
    chosen = batches[step // 2 :: step]
    recipe, device = replace(bundle.recipe, evaluation_batch_size=size), bundle.device
    changed = apply(recipe.evaluation, bundle.model) if recipe.evaluation else contextlib.nullcontext()
    bundle.model.eval()
    try:
        with torch.no_grad(), changed:
            guesses(bundle.model, chosen[0], bundle.pad, device.torch, recipe)
            device.synchronize()
            started = time.perf_counter()
            for batch in chosen:
                guesses(bundle.model, batch, bundle.pad, device.torch, recipe)
            device.synchronize()
            seconds = time.perf_counter() - started
    finally:
        bundle.model.train()
    every = bundle.data.facts.validation_rows / len(ordered)  # rows of the dataset for which a sample stands
    return seconds * every * _padded(batches, recipe) / _padded(chosen, recipe)


def _padded(batches: list[list[Sample]], recipe: Recipe) -> int:
    """The tokens that the device computes for them, padding included."""
    return sum(len(batch) * padded_width(max(len(ids) for ids, _ in batch), recipe) for batch in batches)
