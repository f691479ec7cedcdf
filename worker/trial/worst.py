"""The worst case: the batch of a given size that needs the most memory of all that the job's data can make."""

from __future__ import annotations

from worker.tasks.base import IGNORED, Batch, Sample
from worker.trial import loop
from worker.trial.build import Bundle


def worst_case(bundle: Bundle, micro: int) -> tuple[Batch, int]:
    """`micro` times the longest row, packed rows full; and its number of loss terms."""
    data, length = bundle.data, bundle.spec.dataset.max_length
    longest = max(range(len(data.lengths)), key=lambda one: data.lengths[one])
    if not bundle.rows_are_packed():
        # Side by side in one row, or a row each.
        rows = [[longest] * micro] if bundle.packed() else [[longest]] * micro
        return loop.collate(bundle, rows), micro * max(1, bundle.task.items(data.train[longest]))
    row = _full_row(data.train[longest], length)
    batch = loop.tensors(bundle, [row] * micro, mask=False, packed=True, width=bundle.width(length))
    return batch, max(1, int((batch["labels"] != IGNORED).sum()))


def _full_row(sample: Sample, length: int) -> list[Sample]:
    """Two samples that fill a row: with one, the block-diagonal mask that packing costs would not be made."""
    ids, labels = sample
    half = length // 2
    times = -(-half // len(ids))
    first, second = ((ids * times)[:size] for size in (length - half, half))
    first_labels, second_labels = ((labels * times)[:size] for size in (length - half, half))
    return [(first, first_labels), (second, [IGNORED, *second_labels[1:]])]


def evaluation_batch(bundle: Bundle, size: int) -> Batch:
    """`size` times the longest validation sample, padded as the evaluation pads."""
    longest = max(bundle.data.validation, key=lambda sample: len(sample[0]))
    width = bundle.width(len(longest[0]))
    return loop.tensors(bundle, [[longest]] * size, mask=True, packed=False, width=width)
