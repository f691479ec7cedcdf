"""Linear layers in fp8."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch


def float8_linear(model: Any, recipe: str) -> None:
    """torchao's float8 training in all linear layers but the output layer and those of unsuitable sizes.

    fp8 matmuls need sizes that are multiples of 16 (torchao's documentation), and an fp8 output layer costs accuracy.
    """
    float8 = import_module("torchao.float8")
    head = model.get_output_embeddings()

    def takes(module: torch.nn.Module, _name: str) -> bool:
        return (
            isinstance(module, torch.nn.Linear) and module is not head and not any(n % 16 for n in module.weight.shape)
        )

    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=takes)
