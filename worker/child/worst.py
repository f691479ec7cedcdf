"""The worst case: the batch of a given size that needs the most memory of all that the job's data can make."""

from __future__ import annotations

from service.exports.templates.common import Sample, sample_of
from worker.child import loop
from worker.child.build import Bundle
from worker.tasks.base import IGNORED, Batch


def worst_case(bundle: Bundle, micro: int) -> tuple[Batch, int]:
    """`micro` times the longest row, packed rows full; and its number of loss terms."""
    data, length = bundle.data, bundle.spec.dataset.max_length
    longest = max(range(len(data.lengths)), key=lambda one: data.lengths[one])
    if not bundle.rows_are_packed():
        # Side by side in one row, or a row each.
        rows = [[longest] * micro] if bundle.packed() else [[longest]] * micro
        batch = _ragged(loop.collate(bundle, rows), min(data.lengths))
        return batch, micro * max(1, bundle.task.items(data.train[longest]))
    row = _full_row(data.train[longest], length)
    batch = loop.tensors(bundle, [row] * micro, mask=False, packed=True, width=bundle.width(length))
    return batch, max(1, int((batch["labels"] != IGNORED).sum()))


def _ragged(batch: Batch, shortest: int) -> Batch:
    """The batch with a last row that ends a token early, where the data's rows are not all as long.

    Rows of one length need no mask, and transformers drops it: attention then takes less memory than in real batches.
    """
    if "attention_mask" in batch and shortest < batch["input_ids"].shape[1]:
        batch["attention_mask"][-1, -1] = 0
    return batch


def _full_row(sample: Sample, length: int) -> list[Sample]:
    """Two samples that fill a row: with one, the block-diagonal mask that packing costs would not be made."""
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
    width = bundle.width(max(lengths))
    batch = loop.tensors(bundle, [[longest]] * size, mask=True, packed=False, width=width)
    return _ragged(batch, min(lengths))
