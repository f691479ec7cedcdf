"""Mixture-of-experts layers."""

from __future__ import annotations

from typing import Any


def set_experts(model: Any, implementation: str) -> None:
    """Choose how experts are computed; ValueError when the model has no experts, or does not let them be chosen."""
    if not model._can_set_experts_implementation():
        raise ValueError(f"{model.config.model_type} models have no experts to choose an implementation for")
    model.set_experts_implementation(implementation)
