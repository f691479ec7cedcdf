"""Sequence classification: one label a text."""

from __future__ import annotations

from typing import Any

import torch

from service.contract.job import Columns
from service.contract.rows import class_number
from service.exports.templates.common import Sample, sample_of
from service.exports.templates.segments import rows_of
from worker.child.problem import JobProblem
from worker.tasks.base import Batch, Task, find, only_text


class SequenceClassification(Task):
    """A class a sample, cross-entropy over the step's samples."""

    name = "sequence-classification"

    def columns(self, given: Columns, row: dict[str, Any]) -> dict[str, str]:
        """text + label."""
        text, label = find("text", given.text, row), find("label", given.label, row)
        if text is None or label is None:
            raise JobProblem(
                f"dataset.columns: sequence-classification needs text and label; the data has: {', '.join(row)}"
            )
        return {"text": text, "label": label}

    def encode(
        self, rows: list[dict[str, Any]], columns: dict[str, str], tokenizer: Any, length: int, loss_on: str
    ) -> list[Sample]:
        """Token ids with the tokenizer's special tokens, and the class number."""
        labels = [_class_number(row[columns["label"]], columns["label"]) for row in rows]
        texts = only_text([row[columns["text"]] for row in rows])
        ids = tokenizer(texts, truncation=True, max_length=length)["input_ids"]
        return [sample_of(one, [label]) for one, label in zip(ids, labels, strict=True)]

    def model_class(self) -> Any:
        """AutoModelForSequenceClassification."""
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification

    def model_arguments(self, samples: list[Sample]) -> dict[str, Any]:
        """num_labels."""
        return {"num_labels": max(label for _, (label,) in samples) + 1}

    def items(self, sample: Sample) -> int:
        """One."""
        return 1

    def collate(
        self, rows: list[list[Sample]], pad: int, mask: bool = True, packed: bool = False, width: int = 0
    ) -> Batch:
        """input_ids, attention_mask [rows, longest or `width`], labels [rows]. The mask is always needed here."""
        batch = rows_of(rows, pad, width)
        del batch["position_ids"]
        return batch | {"labels": torch.tensor([row[0][1][0] for row in rows])}

    def loss(self, model: Any, batch: Batch, items: torch.Tensor) -> torch.Tensor:
        """Cross-entropy summed over the micro batch, over the step's samples."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**inputs).logits
        return torch.nn.functional.cross_entropy(logits.float(), batch["labels"], reduction="sum") / items

    def correct(self, output: Any, batch: Batch) -> tuple[int, int]:
        """Classes guessed right."""
        right = output.logits.argmax(-1) == batch["labels"]
        return int(right.sum()), len(right)


def _class_number(value: Any, column: str) -> int:
    number = class_number(value)
    if number is None:
        raise JobProblem(f"dataset.columns.label: column {column!r} holds {value!r}; labels are numbers from 0 on")
    return number
