"""Masked language modelling: guess the masked tokens of a text, seen from both sides."""

from __future__ import annotations

from typing import Any

import torch

from service.contract.job import Columns
from service.exports.templates.common import Sample
from service.exports.templates.masking import masked
from service.exports.templates.segments import rows_of
from worker.child.problem import JobProblem
from worker.tasks.base import IGNORED, Batch, Task, find, only_text


class MaskedLM(Task):
    """15% of a text's tokens are to be guessed, the same ones at every epoch."""

    name = "masked-lm"

    def columns(self, given: Columns, row: dict[str, Any]) -> dict[str, str]:
        """text."""
        text = find("text", given.text, row)
        if text is None:
            raise JobProblem(f"dataset.columns: masked-lm needs text; the data has: {', '.join(row)}")
        return {"text": text}

    def encode(
        self, rows: list[dict[str, Any]], columns: dict[str, str], tokenizer: Any, length: int, loss_on: str
    ) -> list[Sample]:
        """Token ids with masked ones, and labels that are IGNORED elsewhere."""
        if tokenizer.mask_token_id is None:
            raise JobProblem("model.source: its tokenizer has no mask token, so it cannot be trained on masked-lm")
        texts = only_text([row[columns["text"]] for row in rows])
        every = tokenizer(texts, truncation=True, max_length=length)["input_ids"]
        return [masked(ids, tokenizer) for ids in every]

    def model_class(self) -> Any:
        """AutoModelForMaskedLM."""
        from transformers import AutoModelForMaskedLM

        return AutoModelForMaskedLM

    def items(self, sample: Sample) -> int:
        """Tokens to be guessed."""
        return sum(label != IGNORED for label in sample[1])

    def collate(
        self, rows: list[list[Sample]], pad: int, mask: bool = True, packed: bool = False, width: int = 0
    ) -> Batch:
        """input_ids, labels [rows, longest or `width`]; attention_mask, or position_ids when `packed`.

        Encoders see both ways, so the mask is always needed where rows hold one sample, and packed rows need an
        attention kernel that is told where samples end.
        """
        batch = rows_of(rows, pad, width)
        del batch["attention_mask" if packed else "position_ids"]
        return batch

    def loss(self, model: Any, batch: Batch, items: torch.Tensor) -> torch.Tensor:
        """Cross-entropy summed over the micro batch, over the step's tokens to be guessed."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**inputs).logits
        flat = logits.float().flatten(0, 1)
        return torch.nn.functional.cross_entropy(flat, batch["labels"].flatten(), reduction="sum") / items

    def correct(self, output: Any, batch: Batch) -> tuple[int, int]:
        """Masked tokens guessed right."""
        counted = batch["labels"] != IGNORED
        right = (output.logits.argmax(-1) == batch["labels"]) & counted
        return int(right.sum()), int(counted.sum())
