"""LayerNorm and RMSNorm in other precisions and kernels."""

from __future__ import annotations

from importlib import import_module
from types import MethodType
from typing import Any

import torch


def norms_of(model: Any) -> list[Any]:
    """All LayerNorm and RMSNorm modules, by their classes' names."""
    return [module for module in model.modules() if type(module).__name__.endswith(("LayerNorm", "RMSNorm"))]


def low_precision_norms(model: Any) -> None:
    """Run norms in autocast's dtype, not in fp32, where autocast is on. Their weights stay as they are.

    ValueError where the model has no norms, or they do not compute what LayerNorm or RMSNorm compute.
    """
    norms = norms_of(model)
    if not norms:
        raise ValueError("this model has neither LayerNorm nor RMSNorm")
    for module in norms:
        if getattr(module, "weight", None) is None or module.weight.ndim != 1:
            raise ValueError(f"{type(module).__name__} is no norm with one weight a channel")
        kind = module.weight.device.type
        sample = torch.linspace(-1, 2, module.weight.numel(), device=module.weight.device).unsqueeze(0)
        sample = sample.to(module.weight.dtype)  # torch's LayerNorm takes no other
        with torch.no_grad():
            expected = module(sample)
            module.forward = MethodType(_low_precision(type(module).forward), module)
            with torch.autocast(kind, dtype=torch.bfloat16):
                found = module(sample).float()
        if not torch.allclose(found, expected.float(), rtol=0.05, atol=0.05):
            raise ValueError(f"{type(module).__name__} computes something else than LayerNorm or RMSNorm")


def _low_precision(forward: Any) -> Any:
    def in_low_precision(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        kind = hidden.device.type
        if not torch.is_autocast_enabled(kind):
            return forward(self, hidden)
        dtype = torch.get_autocast_dtype(kind)
        bias = getattr(self, "bias", None)
        with torch.autocast(kind, enabled=False):
            hidden, weight = hidden.to(dtype), self.weight.to(dtype)
            if isinstance(self, torch.nn.LayerNorm):
                shift = None if bias is None else bias.to(dtype)
                return torch.nn.functional.layer_norm(hidden, self.normalized_shape, weight, shift, self.eps)
            epsilon = getattr(self, "variance_epsilon", None) or getattr(self, "eps", None)
            if type(self).__name__.startswith("Gemma"):
                weight = weight + 1  # Gemma stores its weights as the difference from 1
            return torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],), weight, epsilon)

    return in_low_precision


def layer_norms(model: Any) -> list[Any]:
    """All of torch's LayerNorm modules."""
    return [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]


def lacking_layer_norms(model: Any) -> str | None:
    """Why Apex's LayerNorm kernels have no place in the model; None where they have one."""
    return None if layer_norms(model) else f"{model.config.model_type} models have no LayerNorm"


def apex_norms(model: Any) -> None:
    """Put Apex's fused kernels in place of torch's LayerNorm; ValueError where the model has none."""
    fused = import_module("apex.normalization").FusedLayerNorm
    if reason := lacking_layer_norms(model):
        raise ValueError(reason)
    for module in layer_norms(model):
        kernel = fused(module.normalized_shape, eps=module.eps).to(module.weight.device)
        kernel.weight, kernel.bias = module.weight, module.bias
        module.forward = kernel.forward
