"""The worst case: of all batches of a given size that the job's data can make, the one that needs the most memory."""

from __future__ import annotations

import math
from array import array

import torch

from training.batches import collate
from training.recipe import task_of
from training.samples import IGNORED, Batch, Sample, sample_of
from worker.child.build import Bundle


def worst_case(bundle: Bundle, micro: int) -> tuple[Batch, int]:
    """(a batch of `micro` times the longest sample, or of `micro` full rows where rows are packed, its loss terms)."""
    data, recipe = bundle.data, bundle.recipe
    longest = data.train[max(range(len(data.lengths)), key=lambda sample: data.lengths[sample])]
    if not recipe.rows_are_packed:
        if recipe.tells_what_is_learnt:
            longest = _learnt_at_its_end(longest[0], data.most_learnt[0])
        # Where samples are laid side by side they share one row; otherwise each has its own.
        rows = [[longest] * micro] if recipe.packed else [[longest]] * micro
        batch = _ragged(collate(rows, bundle.pad, recipe), min(data.lengths), bundle)
        return batch, micro * max(1, task_of(recipe).loss_terms(longest))
    row = _full_row(longest, recipe.max_length)
    if recipe.tells_what_is_learnt:
        row = [_learnt_at_its_end(ids, math.ceil(data.most_learnt[1] * len(ids))) for ids, _ in row]
    batch = collate([row] * micro, bundle.pad, recipe)
    return batch, max(1, int((batch["labels"] != IGNORED).sum()))


def _learnt_at_its_end(ids: array[int], tokens: int) -> Sample:
    """A sample of which the last so many tokens are learnt, but not its first.

    A loss that makes logits for learnt positions only needs memory for these. Of the longest samples, which were cut at
    max_length, often only a few are.
    """
    tokens = min(tokens, len(ids) - 1)
    return sample_of(ids, [IGNORED] * (len(ids) - tokens) + list(ids[len(ids) - tokens :]))


def _is_dear_without_mask(bundle: Bundle) -> bool:
    """Whether attention takes more memory where rows are equally long, as where all were cut at max_length.

    Then transformers drops the mask, and has sdpa compute grouped-query attention. Of its kernels only flash does so:
    where it cannot run, plain matmuls take its place, with all scores of a row.
    """
    config, recipe = bundle.model.config.get_text_config(), bundle.recipe
    heads = getattr(config, "num_attention_heads", 0)
    if recipe.attention != "sdpa" or heads in (0, getattr(config, "num_key_value_heads", heads) or heads):
        return False
    kernels = {choice.function for choice in recipe.before_loading if choice.lever == "attention"}
    dtype = getattr(torch, recipe.autocast) if recipe.autocast else bundle.model.dtype
    return not kernels and not bundle.device.has_flash_attention(dtype)


def _ragged(batch: Batch, shortest: int, bundle: Bundle) -> Batch:
    """The batch with its last row one token shorter, where the data's samples differ in length.

    transformers drops the mask of rows of equal length, and mostly attention takes less memory then.
    """
    differ = shortest < batch["input_ids"].shape[1]
    if "attention_mask" in batch and differ and not _is_dear_without_mask(bundle):
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
    return _ragged(collate([[longest]] * size, bundle.pad, bundle.recipe), min(lengths), bundle)
