"""What an exported file says of the job's data: where they are, how a row is read, and what is to be done first."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
import yaml

from service.contract.recommendation import Recommendation
from service.exports import EXPORTS
from service.exports.job_settings import unread
from tests.exports.test_targets import Facts, made, reading


def told(export: str, found: Recommendation) -> str:
    """The words of an exported file in one line."""
    return " ".join(EXPORTS[export].write(found).replace("#", " ").split())


def formed(found: Recommendation, **form: Any) -> Recommendation:
    """The recommendation for data in another form."""
    assert found.dataset is not None
    data = found.dataset.model_copy(update={"form": found.dataset.form.model_copy(update=form)})
    return found.model_copy(update={"dataset": data})


def named(found: Recommendation, **columns: str) -> Recommendation:
    """The recommendation for data whose columns have these names."""
    assert found.dataset is not None
    return found.model_copy(update={"dataset": found.dataset.model_copy(update={"columns": columns})})


def columns_read(found: Recommendation) -> list[str]:
    """The columns that trl.yaml has TRL read."""
    (dataset,) = yaml.safe_load(EXPORTS["trl.yaml"].write(found))["datasets"]
    columns: list[str] = dataset["columns"]
    return columns


def test_trl_reads_the_columns_of_the_job_only(facts: Facts) -> None:
    """It takes a row with a further column `prompt` for the start of a completion that is not there."""
    found = made(facts)
    assert columns_read(named(found, text="body")) == ["body"]
    assert columns_read(reading(found, ("messages",))) == ["messages"]
    assert columns_read(named(found, prompt="question", completion="answer")) == ["prompt", "completion"]
    assert "rename 'question', 'answer' first" in told("trl.yaml", named(found, prompt="question", completion="answer"))


def test_a_text_called_prompt_is_renamed_for_trl(facts: Facts) -> None:
    found = named(made(facts), text="prompt")
    assert columns_read(found) == ["text"]
    assert yaml.safe_load(EXPORTS["trl.yaml"].write(found))["dataset_text_field"] == "text"
    assert "rename 'prompt' first" in told("trl.yaml", found)


def test_trl_is_told_to_have_no_conversations_in_sharegpts_form(facts: Facts) -> None:
    """A new name for the column alone would not do."""
    found = named(made(facts), messages="conversations")
    assert "rename 'conversations' first" in told("trl.yaml", found) and "ShareGPT" not in told("trl.yaml", found)
    text = told("trl.yaml", formed(found, sharegpt=True))
    assert "rename" not in text and "`role` (user, assistant or system) and `content` in place of `from`" in text
    assert columns_read(formed(found, sharegpt=True)) == ["messages"]


def test_trl_needs_marks_in_the_chat_template_to_learn_what_the_assistant_says(facts: Facts) -> None:
    found = reading(made(facts), ("messages",))
    assert "{% generation %}" in told("trl.yaml", found) and "chat_template_path: FILE.jinja" in told("trl.yaml", found)
    training = found.spec["training"] | {"loss_on": "all"}
    everything = found.model_copy(update={"spec": found.spec | {"training": training}})
    assert "{% generation %}" not in told("trl.yaml", everything)
    assert "{% generation %}" not in told("trl.yaml", made(facts))


@pytest.mark.parametrize("export", ["axolotl", "llamafactory", "ms-swift", "trl.yaml"])
def test_separators_and_numbers_that_a_trainer_does_not_read_are_told(export: str, facts: Facts) -> None:
    """TRL ended at such a number, and found one column in a file with semicolons."""
    found = made(facts)
    assert "csv" not in told(export, found) and "whole numbers" not in told(export, found)
    found = formed(found, csv_options={"delimiter": ";"}, numbers_as_text=True)
    assert "not by semicolons" in told(export, found) and "write these as text" in told(export, found)


def test_what_a_trainer_does_read_is_not_told(facts: Facts) -> None:
    found = formed(made(facts), csv_options={"delimiter": "\t"}, numbers_as_text=True)
    assert len(unread(found)) == len(unread(found, reads=("csv",))) + 1 == len(unread(found, reads=("numbers",))) + 1


def test_what_an_instruction_is_about_is_read_or_told(facts: Facts) -> None:
    found = named(made(facts), prompt="instruction", completion="output", context="about")
    (axolotl,) = yaml.safe_load(EXPORTS["axolotl"].write(found))["datasets"]
    assert axolotl["type"]["field_input"] == "about"
    assert axolotl["type"]["format"].format(instruction="Sort.", input="b a") == "Sort.\nb a"
    assert axolotl["type"]["no_input_format"] == "{instruction}"
    assert '"query": "about"' in told("llamafactory", found)
    columns = json.loads(yaml.safe_load(EXPORTS["ms-swift"].write(found))["columns"])
    assert columns == {"about": "input"}  # the others have the names by which it knows Alpaca's form
    read = script_s_read(EXPORTS["unsloth"].write(found))
    assert read({"instruction": "Sort.", "output": "a b", "about": "b a"})["prompt"] == "Sort.\nb a"
    assert read({"instruction": "Sort.", "output": "a b", "about": None})["prompt"] == "Sort."
    assert columns_read(found) == ["prompt", "completion"]
    assert "the column 'about' is not read: write it behind the prompts" in told("trl.yaml", found)
    assert "rename 'instruction', 'output' first" in told("trl.yaml", found)


def test_tools_are_read(facts: Facts) -> None:
    found = named(made(facts), messages="messages", tools="functions")
    assert yaml.safe_load(EXPORTS["axolotl"].write(found))["datasets"][0]["field_tools"] == "functions"
    assert '"tools": "functions"' in told("llamafactory", found) and "has to hold JSON as text" in told(
        "llamafactory", found
    )
    assert json.loads(yaml.safe_load(EXPORTS["ms-swift"].write(found))["columns"]) == {"functions": "tools"}
    assert columns_read(found) == ["messages", "tools"] and "rename 'functions' first" in told("trl.yaml", found)
    read = script_s_read(EXPORTS["unsloth"].write(found))
    assert read({"messages": [1], "functions": [2]}) == {"messages": [1], "tools": [2]}
    read = script_s_read(EXPORTS["unsloth"].write(formed(found, sharegpt=True)))
    said = read({"messages": [{"from": "gpt", "value": "a"}], "functions": "[]"})
    assert said == {"messages": [{"role": "assistant", "content": "a"}], "tools": "[]"}


def test_a_folder_of_which_a_part_was_read_is_told(facts: Facts) -> None:
    assert "name these files in place of it" in told("axolotl", formed(made(facts), train_files=("main/*.jsonl",)))


def script_s_read(text: str) -> Any:
    """The function of the script for Unsloth that reads a row."""
    tree = ast.parse(text)
    kept = [one for one in tree.body if getattr(one, "name", "") == "read" or "COLUMNS" in ast.unparse(one)[:8]]
    place: dict[str, Any] = {}
    exec(compile(ast.Module(kept, []), "unsloth_train.py", "exec"), place)
    return place["read"]


@pytest.mark.parametrize(("export", "said"), [("trl.yaml", "name: main"), ("axolotl", "name: main")])
@pytest.mark.parametrize("is_local", [True, False])
def test_a_configuration_of_the_hub_is_named(export: str, said: str, is_local: bool, facts: Facts) -> None:
    found = made(facts)
    assert found.dataset is not None
    dataset = found.dataset.model_copy(update={"is_local": is_local})
    spec = found.spec | {"dataset": found.spec["dataset"] | {"config": "main"}}
    found = found.model_copy(update={"dataset": dataset, "spec": spec})
    assert (said in told(export, found)) is not is_local
    assert ('"subset": "main"' in told("llamafactory", found)) is not is_local
    assert (":main" in told("ms-swift", found)) is not is_local
    assert ("'name': 'main'" in EXPORTS["unsloth"].write(found).replace('"', "'")) is not is_local
