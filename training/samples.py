"""The types of a sample and of the rows, micro batches and steps in which samples are arranged."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

IGNORED = -100  # the label of tokens that cross-entropy leaves out

# (token ids, a label for each token or one class number). Arrays of int32 take 4 bytes a token, lists up to 36.
Sample = tuple["array[int]", "array[int]"]
Row = list[int]  # the indices of the samples in a row: one sample, or several when rows are packed
MicroBatch = list[Row]  # the rows that one forward and backward pass takes
Step = list[MicroBatch]  # the micro batches of one optimizer step
Batch = dict[str, Any]  # the model's keyword arguments: tensors, and plain numbers for some attention kernels


def sample_of(ids: Sequence[int], labels: Sequence[int]) -> Sample:
    """A sample as two arrays of int32."""
    return array("i", ids), array("i", labels)


class Samples(Sequence[Sample]):
    """Samples that lie one after the other in two long arrays.

    Two small arrays a sample would take some 200 bytes more each, and a dataset may have millions.
    """

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self.ids, self.labels = array("i"), array("i")
        self.ends = array("q", [0]), array("q", [0])  # where the ids and labels of each sample end
        for sample in samples:
            self.append(sample)

    def append(self, sample: Sample) -> None:
        """Add a sample after the last one."""
        for values, ends, part in zip((self.ids, self.labels), self.ends, sample, strict=True):
            values.extend(part)
            ends.append(len(values))

    def __len__(self) -> int:
        return len(self.ends[0]) - 1

    def __getitem__(self, at: Any) -> Any:
        """The sample at a place, or the list of those in a slice."""
        place = range(len(self))[at]
        if isinstance(place, range):
            return [self[one] for one in place]
        parts = zip((self.ids, self.labels), self.ends, strict=True)
        ids, labels = (values[ends[place] : ends[place + 1]] for values, ends in parts)
        return ids, labels
