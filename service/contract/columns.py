"""The usual names of a dataset's columns, and which of them a task reads. Pure."""

from __future__ import annotations

from collections.abc import Collection

from service.contract.job import Columns, Task

USUAL = {
    "prompt": ("prompt", "instruction", "question", "input"),
    "completion": ("completion", "response", "answer", "output"),
    "messages": ("messages", "conversations"),
    "text": ("text", "sentence", "content", "review"),
    "label": ("label", "labels", "target"),
}
WANTED = {
    "causal-lm": (("prompt", "completion"), ("messages",), ("text",)),
    "sequence-classification": (("text", "label"),),
    "masked-lm": (("text",),),
}
NEEDS = {
    "causal-lm": "causal-lm needs prompt and completion, messages, or text",
    "sequence-classification": "sequence-classification needs text and label",
    "masked-lm": "masked-lm needs text",
}


def usual(kind: str, given: str | None, there: Collection[str]) -> str | None:
    """The column for `kind`: the one named, else the first usual name that is there."""
    return given if given is not None else next((name for name in USUAL[kind] if name in there), None)


def lacking(task: Task, given: Columns, there: Collection[str]) -> str | None:
    """A sentence when no set of columns that the task can read is there, else None."""
    names = given.model_dump()
    if any(all(usual(kind, names[kind], there) for kind in kinds) for kinds in WANTED[task]):
        return None
    return f"dataset.columns: {NEEDS[task]}; the data has: {', '.join(there)}"
