"""The script for Unsloth: values that its loader takes, and data read as they were measured."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch

from service.contract.hardware import HardwareFacts
from service.contract.recommendation import Recommendation
from service.exports import EXPORTS
from service.levers import LEVERS
from tests.exports.test_targets import METHODS, constants, made
from tests.factory import DATASET

Facts = Callable[..., HardwareFacts]


@pytest.mark.parametrize("method", METHODS)
def test_the_dtype_is_one_that_the_loader_takes(method: str, facts: Facts) -> None:
    """It asserts these; names as text it turns into them in some precisions only, and never in full finetuning."""
    for precision in LEVERS["precision"].names:
        text = EXPORTS["unsloth"].write(made(facts, method, precision=precision))
        dtype = constants(text)["LOAD"]["dtype"]
        assert (dtype is None) is (precision == "checkpoint")
        assert dtype in (None, torch.float16, torch.bfloat16, torch.float32), precision
        assert ("\nimport torch\n" in text) is (dtype is not None)


def of_data(found: Recommendation, columns: dict[str, str], **form: Any) -> str:
    """The script for data of these columns and form."""
    data = DATASET.model_copy(update={"columns": columns, "form": DATASET.form.model_copy(update=form)})
    return EXPORTS["unsloth"].write(found.model_copy(update={"dataset": data}))


def reader(text: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The script's function that reads a row."""
    names = constants(text)
    (node,) = (one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef) and one.name == "read")
    exec(compile(ast.Module([node], []), "unsloth_train.py", "exec"), names)
    found: Callable[[dict[str, Any]], dict[str, Any]] = names["read"]
    return found


def test_turns_in_sharegpts_form_are_told_as_trl_has_them(facts: Facts) -> None:
    row = {"talk": [{"from": "human", "value": "name"}, {"from": "gpt", "value": "path"}]}
    turns = [{"role": "user", "content": "name"}, {"role": "assistant", "content": "path"}]
    assert reader(of_data(made(facts), {"messages": "talk"}, sharegpt=True))(row) == {"messages": turns}
    assert reader(of_data(made(facts), {"messages": "talk"}))({"talk": turns}) == {"messages": turns}


def test_numbers_and_nothing_are_text_as_they_were_measured(facts: Facts) -> None:
    read = reader(of_data(made(facts), {"prompt": "asked", "completion": "answer"}, numbers_as_text=True))
    assert read({"asked": 7, "answer": None}) == {"prompt": "7", "completion": ""}


def test_what_is_put_in_is_not_taken_for_a_place_to_put_something_in(facts: Facts) -> None:
    """Columns, sources and templates may have any text, also that of a placeholder."""
    text = of_data(made(facts), {"prompt": "an<SEED>swer", "completion": "<TRAIN>"})
    assert constants(text)["COLUMNS"] == {"an<SEED>swer": "prompt", "<TRAIN>": "completion"}
    template = "{{ messages }}<SEED>"
    assert repr(template).strip("'") in of_data(made(facts), {"messages": "m"}, chat_template=template)


def test_texts_end_as_they_were_measured(facts: Facts) -> None:
    """Unsloth writes an end token behind completions only, and a model that never learns it does not stop."""
    assert 'row["text"].removesuffix(end) + end' in of_data(made(facts), {"text": "text"})
    assert "removesuffix" not in of_data(made(facts), {"prompt": "asked", "completion": "answer"})
