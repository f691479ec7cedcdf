"""What a task is. A sample is a pair of integer lists; a batch is a dictionary of tensors for the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from service.contract.columns import USUAL
from service.contract.job import Columns
from service.exports.templates.common import Sample
from worker.child.problem import JobProblem

IGNORED = -100
Batch = dict[str, Any]  # tensors, and numbers that kernels take as they are


class Task(ABC):
    """Base of all tasks; the methods say what each must do."""

    name: ClassVar[str]

    @abstractmethod
    def columns(self, given: Columns, row: dict[str, Any]) -> dict[str, str]:
        """The columns to read: those named, else the usual names found in the row; JobProblem when missing."""

    @abstractmethod
    def encode(
        self, rows: list[dict[str, Any]], columns: dict[str, str], tokenizer: Any, length: int, loss_on: str
    ) -> list[Sample]:
        """(input_ids, labels) a row, cut at `length` tokens; `loss_on` is the job's, for tasks that generate."""

    @abstractmethod
    def model_class(self) -> Any:
        """The transformers Auto class."""

    def model_arguments(self, samples: list[Sample]) -> dict[str, Any]:
        """What the model's configuration must know of the data, such as the number of labels."""
        return {}

    @abstractmethod
    def items(self, sample: Sample) -> int:
        """How many terms of the loss a sample has: labelled tokens, or 1."""

    @abstractmethod
    def collate(
        self, rows: list[list[Sample]], pad: int, mask: bool = False, packed: bool = False, width: int = 0
    ) -> Batch:
        """Rows of samples, padded on the right to the longest row or `width`, on the CPU; with a mask, or positions."""

    @abstractmethod
    def loss(self, model: Any, batch: Batch, items: torch.Tensor) -> torch.Tensor:
        """The micro batch's share of the step's mean loss: its sum over `items` of the whole step."""

    @abstractmethod
    def correct(self, output: Any, batch: Batch) -> tuple[int, int]:
        """(right, of how many) for the evaluation."""


def find(kind: str, given: str | None, row: dict[str, Any]) -> str | None:
    """The column for `kind`; JobProblem when one is named that is not there."""
    if given is not None:
        if given not in row:
            raise JobProblem(f"dataset.columns.{kind}: there is no column {given!r}; there are: {', '.join(row)}")
        return given
    return next((name for name in USUAL[kind] if name in row), None)


def only_text(values: list[Any]) -> list[str]:
    """The values, if all of them are text; JobProblem names the first that is not."""
    for number, value in enumerate(values, 1):
        if not isinstance(value, str):
            raise JobProblem(
                f"dataset: a text column holds {value!r:.40} ({type(value).__name__}) in row {number}, not text"
            )
    return values
