"""The optimizer over the trained parameters, and the clipping of their gradients."""

from __future__ import annotations

from typing import Any

import torch

from training.recipe import Recipe, apply


def trained_parameters(model: Any) -> list[torch.nn.Parameter]:
    """The model's parameters that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def parameter_groups(model: Any, recipe: Recipe) -> list[dict[str, Any]]:
    """The trained parameters: matrices with weight decay; biases and vectors, as of norms, without; no empty group."""
    matrices: dict[str, Any] = {"params": [], "weight_decay": recipe.weight_decay}
    others: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    for name, one in model.named_parameters():
        if one.requires_grad:  # all experts' biases are one matrix
            group = matrices if one.ndim >= 2 and not name.endswith("bias") else others
            group["params"].append(one)
    return [group for group in (matrices, others) if group["params"]]


def embedding_weights(model: Any) -> set[int]:
    """The ids of the parameters that are embeddings' weights."""
    return {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}


def make_optimizer(model: Any, recipe: Recipe) -> torch.optim.Optimizer:
    """A fresh optimizer over the trained parameters."""
    groups = parameter_groups(model, recipe)
    if recipe.marks_embeddings:
        weights = embedding_weights(model)
        for group in groups:
            group["embeddings"] = [at for at, one in enumerate(group["params"]) if id(one) in weights]
    return apply(recipe.optimizer, groups, recipe.learning_rate)


def gradient_norm(model: Any, optimizer: Any, recipe: Recipe) -> torch.Tensor:
    """Clip the gradients to max_grad_norm (0 leaves them as they are); return their norm before clipping.

    An optimizer that steps in the backward pass has dropped the gradients by then, and has summed up their norm.
    """
    if recipe.steps_in_backward:
        return optimizer.norm()
    if recipe.max_grad_norm:
        return torch.nn.utils.clip_grad_norm_(trained_parameters(model), recipe.max_grad_norm).detach()
    gradients = [one.grad for one in trained_parameters(model) if one.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).detach()
