"""Linear layers in fp8."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer


def float8_linear(model: Any, recipe: str) -> None:
    """torchao's float8 training in the linear layers of the model's blocks, but for those of unsuitable sizes.

    fp8 matmuls need sizes that are multiples of 16 (torchao's documentation), and the number of rows is one of them:
    poolers and heads of classifiers have as many rows as there are samples. An fp8 output layer costs accuracy.
    ValueError where the model has no blocks.
    """
    float8 = import_module("torchao.float8")
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not blocks:
        raise ValueError(f"{model.config.model_type} models have no blocks whose linear layers could be in fp8")
    within = {id(module) for block in blocks for module in block.modules()}

    def takes(module: torch.nn.Module, _name: str) -> bool:
        suits = isinstance(module, torch.nn.Linear) and not any(size % 16 for size in module.weight.shape)
        return suits and id(module) in within

    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=takes)
