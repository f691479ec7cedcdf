"""How the levers of the catalogue are applied in a trial.

Most choices name a function of service/exports/templates/levers/<lever>.py and its arguments: the same text goes into
train.py, so what is exported is what was measured. What is data to the trial itself (precision, batching) lies here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from service.exports.templates.common import parameter_groups
from service.levers import LEVERS
from service.levers.base import Choice, Stage

CODE = "service.exports.templates.levers"


def function(lever: str, choice: Choice) -> Any:
    """The function that applies a choice."""
    assert choice.function is not None, f"{lever}={choice.name} is data"
    return getattr(import_module(f"{CODE}.{lever}"), choice.function)


def apply(stage: Stage, levers: Mapping[str, str], *model: Any) -> None:
    """Change the model by all choices of a stage, in the catalogue's order; before loading there is none."""
    for name, lever in LEVERS.items():
        choice = lever.choice(levers[name])
        if lever.stage == stage and choice.function:
            function(name, choice)(*model, **choice.options)


def make_optimizer(
    levers: Mapping[str, str], model: torch.nn.Module, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """The optimizer over the model's parameter groups."""
    choice = LEVERS["optimizer"].choice(levers["optimizer"])
    groups = parameter_groups(model, weight_decay)
    made: torch.optim.Optimizer = function("optimizer", choice)(groups, learning_rate, **choice.options)
    return made
