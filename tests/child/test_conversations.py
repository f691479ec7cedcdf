"""Which turns of a conversation are learnt, and what is refused because templates would misread it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.child import tiny
from tests.child.test_data_mistakes import TALK, load, refused
from tests.child.test_ordinary_data import TEMPLATE, notes
from training.tasks.causal_lm import Writer, chat

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
        ({"role": "assistant", "content": [{"type": "image", "url": "path"}]}, "only text is trained on"),
    ],
)
def test_turns_that_a_template_would_misread_are_refused(
    tmp_path: Path, tokenizer: Any, turn: dict[str, Any], words: str
) -> None:
    assert words in refused(found, tmp_path, [TALK[0], turn], tokenizer)


def test_a_template_that_is_no_jinja_is_blamed_itself(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = "{% for x in %}"
    said = "is not written as Jinja asks for: Expected an expression, got 'end of statement block' (line 1)"
    assert refused(found, tmp_path, TALK, tokenizer, broken) == f"dataset.chat_template: it {said}"
    monkeypatch.setattr(tokenizer, "chat_template", broken)
    path = tmp_path / "rows.jsonl"
    assert refused(load, path, tokenizer) == f"model.source: its tokenizer's chat template {said}"


def test_a_list_of_texts_is_read_as_text(tmp_path: Path, tokenizer: Any) -> None:
    """Some templates would write the list itself."""
    parts = [{"type": "text", "text": one} for one in ("pa", "th")]
    data = found(tmp_path, [TALK[0], {"role": "assistant", "content": parts}], tokenizer)
    assert list(data.train) == list(found(tmp_path, TALK, tokenizer).train) and "with a list of texts" in notes(data)


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
    shared = [{"from": "human", "value": "name a word"}, {"from": "gpt", "value": "value", "weight": 0}]
    again = found(tmp_path, [*shared, shared[0], {"from": "gpt", "value": "path"}], tokenizer)
    assert list(again.train) == list(data.train) and "20 turns" in notes(again)


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


def test_a_template_that_refuses_a_silent_turn_writes_its_calls(tmp_path: Path, tokenizer: Any) -> None:
    refusing = (
        "{% for m in messages %}{% if not m.content and not m.tool_calls %}{{ raise_exception('silent') }}{% endif %}"
    )
    template = WITH_CALLS.replace("{% for m in messages %}", refusing, 1)
    talk = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert learnt(found(tmp_path, talk, tokenizer, template), tokenizer) == "<look></s>"


def test_no_calls_are_noted_where_there_are_none(tmp_path: Path, tokenizer: Any) -> None:
    """Parquet gives every turn every key; other columns may hold lists of anything."""
    talk = [turn | {"tool_calls": None} for turn in TALK]
    rows = [{"messages": talk, "scores": [1, None, "a"]}] * 20
    data = load(tiny.write(tmp_path / "rows.jsonl", rows), tokenizer, chat_template=TEMPLATE)
    assert "tool_calls" not in notes(data)


TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "spaces": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "earlier turns otherwise": "{% for m in messages %}<{{ m.role }}>{% if not loop.last %}{{ m.content | length }}"
    "{% else %}{{ m.content }}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
def test_what_was_tokenised_once_is_as_if_tokenised_again(tokenizer: Any, template: str) -> None:
    """Where tokens end when turns do; elsewhere, as where a space and a word are one token, it is tokenised again."""
    tokenizer.chat_template = template
    texts = ["path", " path ", "漢字 é", "🙂🙂 ", "\n\nvalue\n", "</s>", "   ", "a", ""]
    calls = dict.fromkeys((True, False), 0)

    def counted(fast: bool) -> Any:
        def apply(*given: Any, **options: Any) -> Any:
            calls[fast] += options["tokenize"]
            return tokenizer.apply_chat_template(*given, **options)

        return apply

    recipe: Any = SimpleNamespace(turn_weights=False)
    for first in texts:
        for second in texts:
            roles = ("user", "assistant") * 2
            talk = [
                {"role": role, "content": text}
                for role, text in zip(roles, (first, second, second, first), strict=True)
            ]
            ours, plain = (chat(talk, Writer(counted(fast), fast), recipe) for fast in (True, False))
            assert ours == plain
    assert calls[True] < calls[False] or "length" in template
