"""Linear layers in fp8."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from training.levers.compile import layers_of


def float8_linear(model: Any, scaling: str) -> None:
    """torchao's float8 training in the linear modules of the model's layers, but for those of unsuitable sizes.

    fp8 matmuls need sizes that are multiples of 16 (torchao's documentation), and the number of rows is one of them:
    poolers and heads of classifiers have as many rows as there are samples. An fp8 output layer costs accuracy.
    """
    float8 = import_module("torchao.float8")
    within = {id(module) for layer in layers_of(model) for module in layer.modules()}

    def takes(module: torch.nn.Module, _name: str) -> bool:
        suits = isinstance(module, torch.nn.Linear) and not any(size % 16 for size in module.weight.shape)
        return suits and id(module) in within

    config = float8.Float8LinearConfig.from_recipe_name(scaling)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=takes)
