"""Every task of the catalogue declares what it reads and has its code in training/tasks."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest
from peft import TaskType

from service.tasks import TASKS

# The functions of a task, with the names of their parameters; a task that has no use for one takes it all the same.
FUNCTIONS = {
    "encode": ["rows", "tokenizer", "recipe"],
    "loss_terms": ["sample"],
    "model_class": [],
    "set_up": ["config", "splits"],
    "summed_loss": ["model", "batch", "count"],
    "scored": ["output", "batch"],
}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_declares_columns_that_it_knows_the_names_of(name: str) -> None:
    task = TASKS[name]
    assert task.summary.endswith(".") and task.needs.startswith(name)
    assert task.column_sets and set(task.kinds) == set(task.columns)
    assert {*task.beside.values()} <= {kind for kinds in task.column_sets for kind in kinds}
    assert task.peft is None or task.peft in TaskType.__members__


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_its_functions(name: str) -> None:
    """They are called by these names, and printed into train.py."""
    module = import_module(f"training.tasks.{name.replace('-', '_')}")
    assert {one: [*inspect.signature(getattr(module, one)).parameters] for one in FUNCTIONS} == FUNCTIONS
    assert module.__doc__
