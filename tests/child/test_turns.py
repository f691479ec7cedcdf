"""Which turns of a conversation are learnt, and what is refused because templates would misread it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.child import tiny
from tests.child.test_data_mistakes import TALK, load, refused
from tests.child.test_ordinary_data import TEMPLATE, notes

CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "path"}}}
WITH_CALLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for one in m.tool_calls or [] %}"
    "<{{ one.function.name }}>{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def found(folder: Path, talk: Any, tokenizer: Any, template: str = TEMPLATE) -> Any:
    """Twenty conversations."""
    return load(tiny.write(folder / "rows.jsonl", [{"messages": talk}] * 20), tokenizer, chat_template=template)


def learnt(data: Any, tokenizer: Any) -> str:
    """What is learnt of the first conversation."""
    return str(tokenizer.decode([label for label in data.train[0][1] if label != -100]))


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        ({"role": "model", "content": "path"}, "the role 'model'; write assistant"),
        ({"role": "bot", "content": "path"}, "the role 'bot'; write assistant"),
        ({"role": "human", "content": "path"}, "the role 'human'; write user"),
        ({"role": "assistant", "content": [{"type": "text", "text": "path"}]}, "write it as text"),
    ],
)
def test_turns_that_a_template_would_misread_are_refused(
    tmp_path: Path, tokenizer: Any, turn: dict[str, Any], words: str
) -> None:
    assert words in refused(found, tmp_path, [TALK[0], turn], tokenizer)


def test_a_conversation_as_text_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    assert "as a list of turns, not as JSON in text" in refused(found, tmp_path, json.dumps(TALK), tokenizer)


def test_without_an_assistant_nothing_is_learnt(tmp_path: Path, tokenizer: Any) -> None:
    """Not the last turn either, which is the user's or a tool's."""
    rows = [{"messages": TALK}] * 20 + [{"messages": [TALK[0], {"role": "narrator", "content": "value"}]}] * 3
    data = load(tiny.write(tmp_path / "rows.jsonl", rows), tokenizer, chat_template=TEMPLATE)
    assert "a conversation without a turn of the assistant" in notes(data)
    assert {learnt(data, tokenizer)} == {"path</s>"} and data.facts.rows == 19


def test_turns_of_weight_0_are_not_learnt(tmp_path: Path, tokenizer: Any) -> None:
    talk = [TALK[0], {"role": "assistant", "content": "value", "weight": 0}, *TALK]
    data = found(tmp_path, talk, tokenizer)
    assert learnt(data, tokenizer) == "path</s>" and data.facts.form.turn_weights
    assert "20 turns of column 'messages' have weight 0" in notes(data)


@pytest.mark.parametrize(("template", "first"), [(TEMPLATE, ""), (WITH_CALLS, "<look></s>")])
def test_a_call_is_learnt_where_the_template_writes_it(
    tmp_path: Path, tokenizer: Any, template: str, first: str
) -> None:
    """Where it does not, what is left is an empty answer, which nobody wants to be learnt."""
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    talk = [TALK[0], calling, {"role": "tool", "content": "value"}, TALK[1]]
    data = found(tmp_path, talk, tokenizer, template)
    assert learnt(data, tokenizer) == f"{first}path</s>"
    assert ("says nothing of tool_calls" in notes(data)) is (not first)
