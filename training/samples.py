"""The types of a sample and of the rows, micro batches and steps in which samples are arranged."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

IGNORED = -100  # the label of tokens that cross-entropy leaves out

# (token ids, a label for each token or one class number). Arrays of int64 take 8 bytes a token, lists up to 36.
Sample = tuple["array[int]", "array[int]"]
Row = list[int]  # the indices of the samples in a row: one sample, or several when rows are packed
MicroBatch = list[Row]  # the rows that one forward and backward pass takes
Step = list[MicroBatch]  # the micro batches of one optimizer step
Batch = dict[str, Any]  # the model's keyword arguments: tensors, and plain numbers for some attention kernels


def sample_of(ids: Sequence[int], labels: Sequence[int]) -> Sample:
    """A sample as two arrays of int64."""
    return array("q", ids), array("q", labels)
