"""Which optimizer steps a trial runs: its samples arranged by the configuration's lever `batching`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from service.levers.batching import BUDGETED, PACKED
from training.batches import arranged, padded_width
from training.errors import TrainingError
from training.recipe import Recipe
from training.samples import MicroBatch, Step
from worker.child.build import Bundle


def plan_of(bundle: Bundle, samples: Sequence[int], micro: int, effective: int | None = None) -> list[Step]:
    """Arrange the samples in optimizer steps. Only the job's seed decides at random, so all trials draw the same."""
    effective = effective or bundle.configuration.effective_batch_size
    recipe = replace(bundle.recipe, micro_batch_size=micro, effective_batch_size=effective)
    return arranged(samples, bundle.data.lengths, bundle.spec.training.seed, recipe)


def candidates(bundle: Bundle, largest: int) -> list[int]:
    """The micro batch sizes worth timing, ascending, none above `largest`, the largest that fits in memory."""
    effective = bundle.configuration.effective_batch_size
    if not bundle.recipe.steps_in_backward:
        return micro_candidates(bundle.configuration.levers["batching"], effective, largest)
    if largest < effective:
        optimizer = bundle.configuration.levers["optimizer"]
        sentence = f"optimizer={optimizer} takes a step in one micro batch: {effective} samples, of which {largest} fit"
        raise TrainingError(sentence, "configuration")
    return [effective]


def micro_candidates(batching: str, effective: int, limit: int) -> list[int]:
    """The micro batch sizes worth timing, ascending, none above `limit`.

    Divisors of the effective batch in general, powers of two for packed rows. A batching with a token budget takes
    any size, so for it they are powers of two and the limit itself.
    """
    if batching in BUDGETED:
        most = min(effective, limit)
        return sorted({most, *(2**power for power in range(10) if 2**power <= most)})
    if batching in PACKED:
        return [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= limit] or [1]
    return [size for size in range(1, min(effective, limit) + 1) if effective % size == 0]


def widest_first(plan: list[Step], lengths: Sequence[int], recipe: Recipe) -> list[Step]:
    """The plan with the widest micro batch's step first, as batches wider than those timed are predicted badly."""
    widest = max(range(len(plan)), key=lambda at: max(shape_of(micro, lengths, recipe)[::-1] for micro in plan[at]))
    return [plan[widest], *plan[:widest], *plan[widest + 1 :]]


def accumulation(batching: str, plan: Sequence[Step], micro: int, effective: int) -> int:
    """How many micro batches a step has: those of a whole step, however few the data's last one has.

    Steps of rows differ in it, as do those of a token budget: then it is the plan's most common count.
    """
    if batching not in (*PACKED, *BUDGETED):
        return -(-effective // micro)
    counts = [len(step) for step in plan]
    return max(sorted(set(counts)), key=counts.count)


def padded_shape(batch: MicroBatch, lengths: Sequence[int]) -> tuple[int, int]:
    """(rows, tokens of the longest row) of a micro batch: its shape before the recipe rounds the width up."""
    return len(batch), max(sum(lengths[sample] for sample in row) for row in batch)


def shape_of(batch: MicroBatch, lengths: Sequence[int], recipe: Recipe) -> tuple[int, int]:
    """(rows, width) of a micro batch as the model gets it, the recipe's rounding of widths included."""
    rows, longest = padded_shape(batch, lengths)
    return rows, padded_width(longest, recipe)
