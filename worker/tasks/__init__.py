"""One training task a file: how its rows become samples, its model class, its loss and its metric."""

from __future__ import annotations

from worker.tasks.base import Task
from worker.tasks.causal_lm import CausalLM
from worker.tasks.masked_lm import MaskedLM
from worker.tasks.sequence_classification import SequenceClassification

__all__ = ["TASKS", "Task"]

TASKS: dict[str, type[Task]] = {task.name: task for task in (CausalLM, SequenceClassification, MaskedLM)}
