"""Causal language modelling: predict each token from those before it, in prompts with completions, chats or texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from os.path import commonprefix
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from training.errors import TrainingError
from training.reading import texts_of
from training.recipe import Recipe
from training.samples import IGNORED, Batch, Sample, Samples, sample_of


def encode(rows: list[dict[str, Any]], tokenizer: Any, recipe: Recipe) -> list[Sample]:
    """Token ids and labels; the labels of a sample's first token, and of tokens that are not learnt, are IGNORED.

    A prompt and its completion are one text to the tokenizer, as they are to a model that goes on with a prompt. A
    text begins with the begin token, where the tokenizer puts one, and ends with the end token, each once.
    """
    if "messages" in recipe.columns:
        if recipe.chat_template is not None:
            tokenizer.chat_template = recipe.chat_template
        pairs = [
            chat(turns_of(row[recipe.columns["messages"]], recipe), writer(row, tokenizer, recipe), recipe)
            for row in rows
        ]
    elif "text" in recipe.columns:
        ends = ends_of(tokenizer)
        texts = texts_of(rows, recipe.columns["text"], recipe)
        pairs = [within(ends, ids) for ids in token_ids(texts, tokenizer)]
    else:
        ends = ends_of(tokenizer)
        prompts, completions = (texts_of(rows, recipe.columns[kind], recipe) for kind in ("prompt", "completion"))
        if "context" in recipe.columns:
            contexts = texts_of(rows, recipe.columns["context"], recipe)
            prompts = [f"{prompt}\n{more}" if more else prompt for prompt, more in zip(prompts, contexts, strict=True)]
        joined = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        both = zip(token_ids(joined, tokenizer), token_ids(prompts, tokenizer), strict=True)
        pairs = [within(ends, ids, len(commonprefix([ids, asked]))) for ids, asked in both]
    return [labelled(ids, learnt, recipe) for ids, learnt in pairs]


def token_ids(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of the texts without special tokens."""
    return list(tokenizer(texts, add_special_tokens=False)["input_ids"])


def ends_of(tokenizer: Any) -> tuple[list[int], list[int]]:
    """(the token that begins every text of this tokenizer, the token that ends a text): none or one of each."""
    first, last = tokenizer.bos_token_id, tokenizer.eos_token_id
    begins = first is not None and list(tokenizer("")["input_ids"])[:1] == [first]
    return [first] if begins else [], [last] if last is not None else []


def within(ends: tuple[list[int], list[int]], ids: list[int], asked: int = 0) -> tuple[list[int], list[bool]]:
    """(a text's tokens between its ends, for each whether it is learnt): what follows the first `asked` is, if any."""
    begin = [] if ids[:1] == ends[0] else ends[0]
    end = [] if ids[-1:] == ends[1] else ends[1]
    learnt = len(ids) - asked + len(end) if len(ids) > asked else 0
    every = begin + ids + end
    return every, [False] * (len(every) - learnt) + [True] * learnt


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
        turns = [{"role": roles.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in conversation]
        if recipe.turn_weights:
            return [turn | {"weight": told.get("weight")} for turn, told in zip(turns, conversation, strict=True)]
        return turns
    if recipe.content_parts and isinstance(conversation, list):
        return [of_one_text(turn) for turn in conversation]
    return conversation


def of_one_text(turn: Any) -> Any:
    """The turn with a list of texts joined to one, as some templates would write the list itself."""
    parts = turn.get("content") if isinstance(turn, dict) else None  # the template refuses what is no turn
    if not isinstance(parts, list):
        return turn
    return turn | {"content": "".join(part if isinstance(part, str) else part["text"] for part in parts)}


def chat(messages: Any, write: Writer, recipe: Recipe) -> tuple[list[int], list[bool]]:
    """(tokens of a conversation by the chat template, for each whether it is learnt: the assistant's are).

    A turn's tokens are those that it adds to the turns before it. Some templates write a turn differently once others
    follow, as without its thoughts; its tokens are then those that change when the turn says something else. A turn
    that says nothing and calls no tool is not learnt, not even its end.
    """
    try:
        everything = write.whole(messages) if messages else []
        learnt = [False] * len(everything)
        for at, turn in enumerate(messages):
            if turn["role"] != "assistant" or (recipe.turn_weights and turn.get("weight") == 0):
                continue
            if turn.get("content") not in ("", None, []) or writes_calls(messages, at, write):
                begin, end = turn_in(everything, messages, at, write)
                learnt[begin:end] = [True] * (end - begin)
    except Exception as error:  # noqa: BLE001 - a template is a program, which may raise whatever it likes
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        shown = f"{str(messages)[:80]!r} does not fit the chat template: {reason}"
        raise TrainingError(f"dataset.columns.messages: {shown}") from error
    return everything, learnt


def writes_calls(messages: Any, at: int, write: Callable[..., list[int]]) -> bool:
    """Whether a turn calls tools, and the chat template writes that; some write an empty turn."""
    calls, silent = messages[at].get("tool_calls"), {"role": messages[at]["role"], "content": ""}
    if not calls:
        return False
    try:
        without = write([*messages[:at], silent])
    except Exception:  # noqa: BLE001 - a template may refuse a turn that says nothing and calls no tool
        return True
    return write([*messages[:at], silent | {"tool_calls": calls}]) != without


def writer(row: dict[str, Any], tokenizer: Any, recipe: Recipe) -> Writer:
    """What writes the row's turns by the chat template, which is told of the row's tools."""
    if "tools" in recipe.columns:
        tools = row.get(recipe.columns["tools"])
        known = json.loads(tools) if isinstance(tools, str) and tools else tools
        return Writer(partial(tokenizer.apply_chat_template, tools=known or None), tokenizer.is_fast)
    return Writer(tokenizer.apply_chat_template, tokenizer.is_fast)


class Writer:
    """Writes turns by a chat template, as tokens: first a whole conversation, and then parts of it or other turns.

    The conversation's first turns are not tokenised again where their text ends with one of its tokens.
    """

    def __init__(self, template: Callable[..., Any], tells_offsets: bool) -> None:
        self.template, self.tells_offsets = template, tells_offsets

    def whole(self, conversation: Any) -> list[int]:
        """The conversation's tokens."""
        more = {"tokenizer_kwargs": {"return_offsets_mapping": True}} if self.tells_offsets else {}
        written = self.template(conversation, tokenize=True, return_dict=True, **more)
        self.text, self.ids = self.template(conversation, tokenize=False), list(written["input_ids"])
        # The end of each token in the text -> how many tokens there are up to it.
        self.counts = {end: at for at, (_, end) in enumerate(written.get("offset_mapping", ()), start=1)}
        return self.ids

    def __call__(self, turns: Any, **options: Any) -> list[int]:
        """The tokens of some turns."""
        if not turns:
            return []
        text = self.template(turns, tokenize=False, **options)
        if len(text) in self.counts and self.text.startswith(text):
            return self.ids[: self.counts[len(text)]]
        return list(self.template(turns, tokenize=True, return_dict=False, **options))


def turn_in(everything: list[int], messages: Any, at: int, write: Callable[..., list[int]]) -> tuple[int, int]:
    """Where the tokens of a turn begin and end in the whole conversation; both at one place for none."""
    asked = write(messages[:at], add_generation_prompt=True)
    done = write(messages[: at + 1])
    if everything[: len(done)] == done:
        if done[: len(asked)] == asked:
            return len(asked), len(done)
        if done[: len(before := write(messages[:at]))] == before:
            return len(commonprefix([done, asked])), len(done)  # the prompt ends with what no answer has, as <think>
    begin, end = turn_that_differs(everything, done, messages, at, write)
    begins = begin < end and len(asked) <= begin and everything[: len(asked)] == asked
    return (len(asked) if begins else begin), end


def turn_that_differs(
    everything: list[int], done: list[int], messages: Any, at: int, write: Callable[..., list[int]]
) -> tuple[int, int]:
    """The same, by what changes in the conversation when the turn says something else.

    The tokens that close a turn belong to it as far as they also close a last turn: `done` ends with the turn.
    """
    begin, end, after = len(everything), 0, len(done)
    for word in "01":  # the turn begins with one of them at most, and ends with one at most
        other = {"role": messages[at]["role"], "content": word}
        try:
            changed = write([*messages[:at], other, *messages[at + 1 :]])
            last = write([*messages[:at], other])
        except Exception:  # noqa: BLE001 - a template may refuse another turn there, as before a tool's answer
            return 0, 0
        if changed == everything:
            continue  # the turn says this word
        same = len(commonprefix([everything, changed]))
        rest = len(commonprefix([everything[same:][::-1], changed[same:][::-1]]))
        begin, end = min(begin, same), max(end, len(everything) - rest)
        after = min(after, len(commonprefix([done[::-1], last[::-1]])))
    return begin, end + len(commonprefix([done[len(done) - after :], everything[end:]]))


def loss_terms(sample: Sample) -> int:
    """How many terms of the loss a sample has: the number of tokens that are learnt."""
    return sum(label != IGNORED for label in sample[1])


def model_class() -> Any:
    """The transformers class that loads a model for this task."""
    return AutoModelForCausalLM


def set_up(config: Any, splits: Sequence[Samples]) -> None:
    """Nothing: for this task, the model's configuration does not depend on the data."""


def summed_loss(model: Any, batch: Batch, count: torch.Tensor) -> torch.Tensor:
    """The micro batch's share of the step's mean loss: its summed cross-entropy over the step's `count` terms."""
    return model(**batch, num_items_in_batch=count, use_cache=False).loss


def scored(output: Any, batch: Batch) -> tuple[float, int, int]:
    """(mean loss, next tokens guessed right, of how many)."""
    target, guess = batch["labels"][:, 1:], output.logits[:, :-1].argmax(-1)
    hits = (guess == target) & (target != IGNORED)
    return float(output.loss), int(hits.sum()), int((target != IGNORED).sum())
