"""The form in which a dataset was found: what has to be known to read it as its user means it. Pure, without I/O.

The control plane looks at the first rows of a dataset in the same way as the worker looks at all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from pydantic import Field

from service.contract.base import Contract
from service.tasks.base import Task
from service.text import counted

SPEAKERS = ("human", "user", "gpt", "assistant", "system")  # who may speak in a conversation of ShareGPT's form
# Roles that chat templates do not know, though some data has them, and what they are called there.
RENAMED = {"human": "user"} | dict.fromkeys(("gpt", "model", "bot", "chatbot", "ai"), "assistant")
NAMED = 8  # classes that a note names


class DataForm(Contract):
    """How a dataset is read where it is not in the plainest form. The fields are those of the training Recipe."""

    below: str = Field(default="", description="The folder within the dataset that is read; empty for all of it.")
    train_files: tuple[str, ...] = Field(
        default=(), description="Patterns of the files that train; empty where files' names say which do."
    )
    validation_files: tuple[str, ...] = Field(default=(), description="The same of those that validate.")
    csv_options: dict[str, str] = Field(default_factory=dict, description="Arguments of csv.DictReader.")
    json_arrays: bool = Field(default=False, description="A .json file holds one array of rows, not one row a line.")
    numbers_as_text: bool = Field(default=False, description="A text column holds whole numbers, read as text.")
    sharegpt: bool = Field(default=False, description="Turns have `from` and `value`, not `role` and `content`.")
    content_parts: bool = Field(default=False, description="The content of some turns is a list of texts.")
    turn_weights: bool = Field(default=False, description="Turns of the assistant with `weight` 0 are not learnt.")
    classes: dict[str, int] = Field(
        default_factory=dict, description="Label as text -> class number; empty where labels are the class numbers."
    )
    chat_template: str | None = Field(default=None, description="The text of the job's own chat template.")


def form_of(
    task: Task, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """(the fields of DataForm that the values decide, a note on each thing that was assumed).

    ValueError says in one sentence which value cannot be read, and what may stand there.
    """
    fields: dict[str, Any] = {}
    notes: list[str] = []
    for kind, column in columns.items():
        lacking = next((row for row in rows if column not in row), None)
        if lacking is not None and kind not in task.beside:
            raise ValueError(f"dataset.columns.{kind}: a row lacks the column {column!r}: {dict(lacking)!r:.80}")
        try:
            found, said = _form_of_column(task, kind, column, [row.get(column) for row in rows])
        except ValueError as error:
            raise ValueError(f"dataset.columns.{kind}: column {column!r} holds {error}") from error
        fields |= found
        notes += said
    return fields, notes


def _form_of_column(task: Task, kind: str, column: str, values: list[Any]) -> tuple[dict[str, Any], list[str]]:
    """What `form_of` says of one column; ValueError says what it holds that cannot be read."""
    if kind == "label":
        classes = class_numbers(values)
        return ({"classes": classes}, [_numbered(column, classes)]) if classes else ({}, [])
    if kind == "messages":
        return _form_of_conversations(column, values)
    if kind == "tools":
        check_tools(values)
        return {}, [f"The chat template is told the tools of column {column!r}."]
    fields: dict[str, Any] = {}
    notes: list[str] = []
    if count := whole_numbers(values, task.null_is_empty_text):
        fields["numbers_as_text"] = True
        notes.append(f"Column {column!r} holds whole numbers in {count} of {len(values)} rows, read as text.")
    if kind == "context":
        notes.append(f"Column {column!r} (context) was appended to each prompt, on a line of its own.")
    return fields, notes


def _form_of_conversations(column: str, values: list[Any]) -> tuple[dict[str, Any], list[str]]:
    """What `form_of` says of a column of conversations."""
    fields: dict[str, Any] = {}
    notes: list[str] = []
    if is_sharegpt(values):
        fields["sharegpt"] = True
        notes.append(f"Column {column!r} is in ShareGPT's form: human was read as user, gpt as assistant.")
    elif check_turns(values):
        fields["content_parts"] = True
        notes.append(f"Turns of column {column!r} with a list of texts were read as these texts in a row.")
    if weighted := sum(map(_of_no_weight, _turns(values))):
        fields["turn_weights"] = True
        turns = counted(weighted, "turn", "turns")
        have = "has weight 0, and is" if weighted == 1 else "have weight 0, and are"
        notes.append(f"{turns} of column {column!r} {have} not learnt.")
    return fields, notes


def unfit(task: Task, kind: str, values: Sequence[Any]) -> str | None:
    """Why the values of a column beside others cannot be read as its kind, or None."""
    try:
        if kind == "tools":
            check_tools(values)
        else:
            whole_numbers(values, task.null_is_empty_text)
    except ValueError as error:
        return str(error)
    return None


def class_number(value: Any) -> int | None:
    """The class that a label stands for, a whole number from 0 on; None for any other value."""
    try:
        number = int(float(value)) if _is_decimal(value) else int(value)
        exact = float(value) == number if _is_decimal(value) or isinstance(value, float) else True
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number >= 0 and exact else None


def class_numbers(labels: Iterable[Any]) -> dict[str, int]:
    """Each label, as text, with the number of its class; empty where the labels are 0, 1, 2 and so on themselves.

    Names, and numbers with gaps, are numbered in sorted order, as transformers' run_classification.py does. ValueError
    for what is neither, and for names beside numbers.
    """
    numbers: dict[str, int] = {}
    names: set[str] = set()
    any_decimal = False
    for label in labels:
        number = class_number(label)
        if number is not None:
            numbers[str(label)] = number
            any_decimal |= _is_decimal(label)
        elif isinstance(label, str) and label.strip() and not _is_number(label):
            names.add(label)
        else:
            raise ValueError(f"{label!r:.80}; labels are all whole numbers from 0 on, or all names")
        if numbers and names:
            other = next(iter(numbers if label in names else names))
            raise ValueError(
                f"{label!r:.80} beside {other!r:.80}; labels are all whole numbers from 0 on, or all names"
            )
    if names:
        return {name: at for at, name in enumerate(sorted(names))}
    known = sorted(set(numbers.values()))
    if known == list(range(len(known))) and not any_decimal:
        return {}
    rank = {number: at for at, number in enumerate(known)}
    return {text: rank[number] for text, number in sorted(numbers.items(), key=lambda one: one[1])}


def _is_decimal(value: Any) -> bool:
    """Whether a value is text other than digits, such as 1.0, which pandas writes into csv files for 1."""
    return isinstance(value, str) and not value.strip().isdecimal()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _numbered(column: str, classes: Mapping[str, int]) -> str:
    """The sentence that says which label is which class."""
    shown = ", ".join(f"{name!r} is {number}" for name, number in islice(classes.items(), NAMED))
    more = f" and so on, {len(classes)} in all" if len(classes) > NAMED else ""
    return f"The labels of column {column!r} were numbered in sorted order: {shown}{more}."


def is_sharegpt(conversations: Sequence[Any]) -> bool:
    """Whether conversations are in ShareGPT's form; ValueError where one of them is in another, or has odd turns."""
    if not any(talk and _from_and_value(talk) for talk in conversations):
        return False
    for talk in conversations:
        if not _from_and_value(talk):
            raise ValueError(f"{talk!r:.80}, where others have turns of from (one of {', '.join(SPEAKERS)}) and value")
        for turn in talk:
            if turn["from"] not in SPEAKERS or not isinstance(turn["value"], str):
                known = ", ".join(SPEAKERS)
                raise ValueError(f"the turn {turn!r:.80}; `from` must be one of {known}, and `value` text")
    return True


def check_turns(conversations: Sequence[Any]) -> bool:
    """Whether the content of a turn is a list of texts; ValueError for what templates or we would misread.

    What is no conversation at all is left to the chat template, a program of its own, to refuse.
    """
    if texts := [talk for talk in conversations if isinstance(talk, str)]:
        raise ValueError(
            f"{texts[0]!r:.80}, which is text; write a conversation as a list of turns, not as JSON in text"
        )
    parts = False
    for turn in _turns(conversations):
        role, content = turn.get("role"), turn.get("content")
        if isinstance(role, str) and role in RENAMED:
            raise ValueError(f"turns of the role {role!r}; write {RENAMED[role]}, which is what chat templates know")
        if isinstance(content, list):
            if not all(map(_is_text, content)):
                raise ValueError(f"the content {content!r:.80}; only text is trained on, write it as such")
            parts = True
    return parts


def _is_text(part: Any) -> bool:
    """Whether a part of a turn's content is text: by itself, or as OpenAI's and transformers' formats have it."""
    if isinstance(part, dict):
        return part.get("type", "text") == "text" and isinstance(part.get("text"), str)
    return isinstance(part, str)


def _turns(conversations: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for talk in conversations:
        if isinstance(talk, list):
            yield from (turn for turn in talk if isinstance(turn, dict))


def _of_no_weight(turn: Mapping[str, Any]) -> bool:
    """Whether it is a turn of the assistant that is not to be learnt."""
    return turn.get("weight") == 0 and (turn.get("role") == "assistant" or turn.get("from") in ("gpt", "assistant"))


def _from_and_value(talk: Any) -> bool:
    return isinstance(talk, list) and all(isinstance(turn, dict) and {"from", "value"} <= turn.keys() for turn in talk)


def check_tools(values: Iterable[Any]) -> None:
    """ValueError for what is no list of tools, written as JSON text or not; rows may have none."""
    for value in values:
        try:
            found = json.loads(value) if isinstance(value, str) and value else value
        except ValueError:
            raise ValueError(f"{value!r:.80}, which is no JSON; write the list of tools as JSON") from None
        if found and not isinstance(found, list):
            raise ValueError(f"{value!r:.80}; write a list of tools, each with its name and parameters")


def whole_numbers(values: Iterable[Any], null_is_empty: bool) -> int:
    """How many values of a text column are whole numbers; ValueError for one that is no text either."""
    count = 0
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool):
            count += 1
        elif not isinstance(value, str) and not (value is None and null_is_empty):
            raise ValueError(f"{value!r:.40} ({type(value).__name__}), which is not text; write it as text")
    return count
