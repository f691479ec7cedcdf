"""Causal language modelling: prompt and completion, chat messages, or plain text."""

from __future__ import annotations

from typing import Any

import torch

from service.contract.job import Columns
from service.exports.templates.common import Sample
from service.exports.templates.data import chat, labelled, learnt_from
from service.exports.templates.segments import rows_of
from worker.child.problem import JobProblem
from worker.tasks.base import IGNORED, Batch, Task, find, only_text


class CausalLM(Task):
    """Next-token prediction; packed rows carry position_ids that restart at each sample."""

    name = "causal-lm"

    def columns(self, given: Columns, row: dict[str, Any]) -> dict[str, str]:
        """prompt + completion, or messages, or text."""
        named = given.messages or given.text
        prompt, completion = find("prompt", given.prompt, row), find("completion", given.completion, row)
        if prompt and completion and not named:
            return {"prompt": prompt, "completion": completion}
        messages, text = find("messages", given.messages, row), find("text", given.text, row)
        if messages and not given.text:
            return {"messages": messages}
        if text:
            return {"text": text}
        raise JobProblem(
            f"dataset.columns: causal-lm needs prompt and completion, messages, or text; the data has: {', '.join(row)}"
        )

    def encode(
        self, rows: list[dict[str, Any]], columns: dict[str, str], tokenizer: Any, length: int, loss_on: str
    ) -> list[Sample]:
        """Token ids and labels, which are IGNORED for what is not learnt and for each sample's first token."""
        end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        begin = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
        if "messages" in columns:
            pairs = [self._chat(row[columns["messages"]], tokenizer) for row in rows]
        elif "text" in columns:
            texts = self._ids([row[columns["text"]] for row in rows], tokenizer)
            pairs = [learnt_from(begin, text + end) for text in texts]
        else:
            prompts = self._ids([row[columns["prompt"]] for row in rows], tokenizer)
            completions = self._ids([row[columns["completion"]] for row in rows], tokenizer)
            pairs = [learnt_from(begin + prompt, done + end) for prompt, done in zip(prompts, completions, strict=True)]
        return [labelled(ids, learnt, length, loss_on) for ids, learnt in pairs]

    def _ids(self, texts: list[Any], tokenizer: Any) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(
            only_text(["" if text is None else text for text in texts]), add_special_tokens=False
        )["input_ids"]
        return ids

    def _chat(self, messages: Any, tokenizer: Any) -> tuple[list[int], list[bool]]:
        """The template's tokens and which are learnt; JobProblem where it makes nothing of the messages."""
        from jinja2 import TemplateError

        if tokenizer.chat_template is None:
            raise JobProblem("dataset.columns.messages: this model's tokenizer has no chat template")
        try:
            return chat(messages, tokenizer)
        except (TemplateError, TypeError, AttributeError, KeyError, ValueError) as error:
            text = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            shown = f"{str(messages)[:80]!r} is no chat for the model's template: {text}"
            raise JobProblem(f"dataset.columns.messages: {shown}") from error

    def model_class(self) -> Any:
        """AutoModelForCausalLM."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM

    def items(self, sample: Sample) -> int:
        """Labelled tokens."""
        return sum(label != IGNORED for label in sample[1])

    def collate(
        self, rows: list[list[Sample]], pad: int, mask: bool = False, packed: bool = False, width: int = 0
    ) -> Batch:
        """input_ids, labels [rows, longest or `width`]; attention_mask when `mask`; position_ids when `packed`.

        Right padding needs no mask under causal attention, and without one the flash kernel can run. In packed
        rows the padding is a sample of its own, so that nothing attends across.
        """
        batch = rows_of(rows, pad, width)
        if packed or not mask:
            del batch["attention_mask"]
        if not packed:
            del batch["position_ids"]
        return batch

    def loss(self, model: Any, batch: Batch, items: torch.Tensor) -> torch.Tensor:
        """Cross-entropy summed over the micro batch, over the step's labelled tokens."""
        return model(**batch, num_items_in_batch=items, use_cache=False).loss

    def correct(self, output: Any, batch: Batch) -> tuple[int, int]:
        """Next tokens guessed right."""
        target = batch["labels"][:, 1:]
        counted = target != IGNORED
        right = (output.logits[:, :-1].argmax(-1) == target) & counted
        return int(right.sum()), int(counted.sum())
