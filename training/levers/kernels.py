"""Puts Liger's kernels, or those of the Hugging Face hub, into a model."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

GATED = {"swiglu", "geglu"}  # Liger's kernels for gated MLPs


def liger_kernels(model: Any, operations: list[str]) -> None:
    """Put the kernels into this instance; ValueError when Liger does not know the model type or an operation.

    Liger's cross-entropy is always off here: on classifiers it puts in a causal LM's forward, and on other models it
    is a choice of the lever `head`.
    """
    kind = model.config.model_type
    if reason := lacking_in_liger(kind, operations):
        raise ValueError(reason)
    patch = import_module("liger_kernel.transformers.monkey_patch")
    known = inspect.signature(patch.MODEL_TYPE_TO_APPLY_LIGER_FN[kind]).parameters
    every = ("rope", "rms_norm", "swiglu", "geglu", "layer_norm", "cross_entropy", "fused_linear_cross_entropy")
    patch._apply_liger_kernel_to_instance(model=model, **{one: one in operations for one in every if one in known})


def lacking_in_liger(kind: str, operations: list[str]) -> str | None:
    """Why Liger, which must be installed, cannot put these kernels into models of a kind; None where it can."""
    known = import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    if kind not in known:
        return f"Liger has no kernels for {kind} models"
    has = set(inspect.signature(known[kind]).parameters)
    if GATED.issubset(operations) and GATED & has:
        has |= GATED  # a model has one kind of gated MLP, and both were asked for
    missing = [one for one in operations if one not in has]
    return f"Liger has no {', '.join(missing)} for {kind} models" if missing else None


def hub_kernels(model: Any) -> None:
    """Put the hub's kernels for training into the model's layers; ValueError when there is none for any of them.

    transformers silently keeps a layer's own code where a kernel cannot be loaded, as without network. A layer
    that was given a kernel has a `forward` of its own instead of its class's.
    https://huggingface.co/docs/transformers/kernel_doc/overview
    """
    before = {name for name, layer in model.named_modules() if "forward" in vars(layer)}
    model.set_use_kernels(True, mode=import_module("kernels").Mode.TRAINING)
    if {name for name, layer in model.named_modules() if "forward" in vars(layer)} <= before:
        kind = model.config.model_type
        raise ValueError(f"the hub has no kernel for any layer of a {kind} model here, or it could not be loaded")
