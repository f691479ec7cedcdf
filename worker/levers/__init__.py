"""How the levers of the catalogue are applied in a trial.

Most choices name a function of service/exports/templates/levers/<lever>.py and its arguments: the same text goes into
train.py, so what is exported is what was measured. What is data to the trial itself (precision, batching) lies here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

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
    """The optimizer over two parameter groups: matrices with decay, vectors (biases, norms) without."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [one for one in trained if one.ndim >= 2], "weight_decay": weight_decay},
        {"params": [one for one in trained if one.ndim < 2], "weight_decay": 0.0},
    ]
    choice = LEVERS["optimizer"].choice(levers["optimizer"])
    made: torch.optim.Optimizer = function("optimizer", choice)(
        [group for group in groups if group["params"]], learning_rate, **choice.options
    )
    return made
