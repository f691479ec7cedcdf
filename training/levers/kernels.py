"""Puts Liger's kernels into a model."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any


def liger_kernels(model: Any, operations: list[str]) -> None:
    """Put the kernels into this instance; ValueError when Liger does not know the model type or an operation.

    Liger's cross-entropy is always off here: on classifiers it puts in a causal LM's forward, and on other models it
    is a choice of the lever `head`.
    """
    patch = import_module("liger_kernel.transformers.monkey_patch")
    kind = model.config.model_type
    apply = patch.MODEL_TYPE_TO_APPLY_LIGER_FN.get(kind)
    if apply is None:
        raise ValueError(f"Liger has no kernels for {kind} models")
    known = inspect.signature(apply).parameters
    if missing := [one for one in operations if one not in known]:
        raise ValueError(f"Liger has no {', '.join(missing)} for {kind} models")
    every = ("rope", "rms_norm", "swiglu", "geglu", "layer_norm", "cross_entropy", "fused_linear_cross_entropy")
    patch._apply_liger_kernel_to_instance(model=model, **{one: one in operations for one in every if one in known})
