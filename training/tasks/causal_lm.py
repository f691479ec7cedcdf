"""Causal language modelling: predict each token from those before it, in prompts with completions, chats or texts."""

from __future__ import annotations

from os.path import commonprefix
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from training.errors import TrainingError
from training.reading import texts_of
from training.recipe import Recipe
from training.samples import IGNORED, Batch, Sample, sample_of


def encode(rows: list[dict[str, Any]], tokenizer: Any, recipe: Recipe) -> list[Sample]:
    """Token ids and labels; the labels of a sample's first token, and of tokens that are not learnt, are IGNORED."""
    begin = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    if "messages" in recipe.columns:
        if recipe.chat_template is not None:
            tokenizer.chat_template = recipe.chat_template
        pairs = [chat(turns_of(row[recipe.columns["messages"]], recipe), tokenizer) for row in rows]
    elif "text" in recipe.columns:
        pairs = [answered(begin, ids, end) for ids in token_ids(rows, recipe.columns["text"], tokenizer, recipe)]
    else:
        prompts = token_ids(rows, recipe.columns["prompt"], tokenizer, recipe)
        completions = token_ids(rows, recipe.columns["completion"], tokenizer, recipe)
        pairs = [answered(begin + asked, answer, end) for asked, answer in zip(prompts, completions, strict=True)]
    return [labelled(ids, learnt, recipe) for ids, learnt in pairs]


def token_ids(rows: list[dict[str, Any]], column: str, tokenizer: Any, recipe: Recipe) -> list[list[int]]:
    """Token ids of the column's texts without special tokens."""
    return list(tokenizer(texts_of(rows, column, recipe), add_special_tokens=False)["input_ids"])


def answered(asked: list[int], answer: list[int], end: list[int]) -> tuple[list[int], list[bool]]:
    """(all tokens, for each whether it is learnt): those of the answer and its end are, unless the answer is empty."""
    return asked + answer + end, [False] * len(asked) + [bool(answer)] * len(answer + end)


def labelled(ids: list[int], learnt: list[bool], recipe: Recipe) -> Sample:
    """A sample cut at max_length. Its first token is no target, as in a packed row another sample comes before it."""
    if recipe.loss_on == "all":
        learnt = [True] * len(ids)
    labels = [one if target else IGNORED for one, target in zip(ids, learnt, strict=True)]
    return sample_of(ids[: recipe.max_length], [IGNORED, *labels[1 : recipe.max_length]])


def turns_of(conversation: Any, recipe: Recipe) -> Any:
    """The conversation's turns as chat templates take them: each with `role` and `content`."""
    if recipe.sharegpt:
        roles = {"human": "user", "gpt": "assistant"}
        return [{"role": roles.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in conversation]
    return conversation


def chat(messages: Any, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """(tokens of a conversation by the chat template, for each whether it is learnt: the assistant's are).

    A turn's tokens are those that it adds to the turns before it. An empty turn is not learnt, not even its end. Some
    templates write the last turn in another way (they drop earlier turns' thoughts): then only the last turn is learnt,
    as where no role is `assistant`.
    """

    def ids_of(turns: Any, **options: bool) -> list[int]:
        if not turns:
            return []
        return list(tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False, **options))

    try:
        whole = ids_of(messages)
        learnt, last = [False] * len(whole), len(messages) - 1
        for at in [at for at, turn in enumerate(messages) if turn["role"] == "assistant"] or [last]:
            asked, done = ids_of(messages[:at], add_generation_prompt=True), ids_of(messages[: at + 1])
            begin = len(asked)
            if done[:begin] != asked and done[: len(before := ids_of(messages[:at]))] == before:
                begin = len(commonprefix([done, asked]))  # the prompt ends with what no answer has, such as <think>
            if at == last or (whole[: len(done)] == done and done[:begin] == asked[:begin]):
                said = at >= 0 and messages[at].get("content") != ""  # -1 is the last turn of no turns
                learnt[begin : len(done)] = [said] * (len(done) - begin)
    except Exception as error:  # noqa: BLE001 - a template is a program, which may raise whatever it likes
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        shown = f"{str(messages)[:80]!r} does not fit the chat template: {reason}"
        raise TrainingError(f"dataset.columns.messages: {shown}") from error
    return whole, learnt


def loss_terms(sample: Sample) -> int:
    """How many terms of the loss a sample has: the number of tokens that are learnt."""
    return sum(label != IGNORED for label in sample[1])


def model_class() -> Any:
    """The transformers class that loads a model for this task."""
    return AutoModelForCausalLM


def set_up(config: Any, samples: list[Sample]) -> None:
    """Nothing: for this task, the model's configuration does not depend on the data."""


def summed_loss(model: Any, batch: Batch, count: torch.Tensor) -> torch.Tensor:
    """The micro batch's share of the step's mean loss: its summed cross-entropy over the step's `count` terms."""
    return model(**batch, num_items_in_batch=count, use_cache=False).loss


def scored(output: Any, batch: Batch) -> tuple[float, int, int]:
    """(mean loss, next tokens guessed right, of how many)."""
    target, guess = batch["labels"][:, 1:], output.logits[:, :-1].argmax(-1)
    hits = (guess == target) & (target != IGNORED)
    return float(output.loss), int(hits.sum()), int((target != IGNORED).sum())
