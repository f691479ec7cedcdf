"""The worst case: of all batches of a given size that the job's data can make, the one that needs the most memory."""

from __future__ import annotations

import math

from training.batches import collate
from training.recipe import task_of
from training.samples import IGNORED, Batch, Sample, sample_of
from worker.child.build import Bundle


def worst_case(bundle: Bundle, micro: int) -> tuple[Batch, int]:
    """(a batch of `micro` times the longest sample, or of `micro` full rows where rows are packed, its loss terms)."""
    data, recipe = bundle.data, bundle.recipe
    longest = data.train[max(range(len(data.lengths)), key=lambda sample: data.lengths[sample])]
    if recipe.tells_what_is_learnt:
        longest = _most_learnt(longest, data.train, recipe.rows_are_packed)
    if not recipe.rows_are_packed:
        # Where samples are laid side by side they share one row; otherwise each has its own.
        rows = [[longest] * micro] if recipe.packed else [[longest]] * micro
        batch = _ragged(collate(rows, bundle.pad, recipe), min(data.lengths))
        return batch, micro * max(1, task_of(recipe).loss_terms(longest))
    batch = collate([_full_row(longest, recipe.max_length)] * micro, bundle.pad, recipe)
    return batch, max(1, int((batch["labels"] != IGNORED).sum()))


def _most_learnt(longest: Sample, samples: list[Sample], fills_rows: bool) -> Sample:
    """The longest sample, in which as many tokens are learnt as in any sample; where it fills rows, as large a share.

    A loss that makes logits for learnt positions only needs memory for these. Of the longest samples, which were cut at
    max_length, often only a few are.
    """
    counts = [len(labels) - labels.count(IGNORED) for _, labels in samples]
    ids, _ = longest
    most = max(counts)
    if fills_rows:
        share = max(count / len(labels) for count, (_, labels) in zip(counts, samples, strict=True))
        most = max(most, min(len(ids) - 1, math.ceil(share * len(ids))))
    return sample_of(ids, [IGNORED] * (len(ids) - most) + list(ids[len(ids) - most :]))


def _ragged(batch: Batch, shortest: int) -> Batch:
    """The batch with its last row one token shorter, where the data's samples differ in length.

    transformers drops the mask of rows of equal length, with which attention takes less memory than in real batches.
    """
    if "attention_mask" in batch and shortest < batch["input_ids"].shape[1]:
        batch["attention_mask"][-1, -1] = 0
    return batch


def _full_row(sample: Sample, length: int) -> list[Sample]:
    """Two samples that fill a row: a row of one sample would not need the block-diagonal mask that packing costs."""
    ids, labels = sample
    half = length // 2
    times = -(-half // len(ids))
    first, second = ((ids * times)[:size] for size in (length - half, half))
    first_labels, second_labels = ((labels * times)[:size] for size in (length - half, half))
    return [(first, first_labels), sample_of(second, [IGNORED, *second_labels[1:]])]


def evaluation_batch(bundle: Bundle, size: int) -> Batch:
    """`size` times the longest validation sample, padded as the evaluation pads."""
    lengths = [len(ids) for ids, _ in bundle.data.validation]
    longest = bundle.data.validation[lengths.index(max(lengths))]
    return _ragged(collate([[longest]] * size, bundle.pad, bundle.recipe), min(lengths))
