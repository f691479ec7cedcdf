"""What each choice of a lever costs: factors and amounts that the physics of a step is made of.

The figures follow from what the choices do (bytes read and written, kernels started, activations kept) and from
published measurements; a surface may change them. In all fields a larger value is worse, so that scores never fall
when a field rises. That is what makes the exhaustive search's pruning exact (exhaustive.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from service.levers import LEVERS

# Fields that multiply over levers, and their neutral value is 1.
FACTORS = (
    "matmul",  # seconds of matrix multiplications
    "attention",  # seconds of attention
    "elementwise",  # seconds of operations that memory bounds
    "kernels",  # kernels that are started
    "head",  # seconds of the output layer and its loss
    "activations",  # bytes a token keeps
    "logits",  # bytes of logits
    "fragments",  # bytes that the allocator holds beside those in use
    "everything",  # seconds of all
)
# Fields that are added over levers, and their neutral value is 0.
AMOUNTS = (
    "recompute",  # share of the forward pass that is computed again
    "transfer",  # bytes a token and layer that move between host and device, in units of the hidden size
    "frozen",  # bytes a frozen weight
    "trained",  # bytes a trained weight, its gradient left out
    "state",  # bytes of optimizer state a trained weight
    "copies",  # gradients that exist beside the first
    "update",  # bytes an optimizer step moves for each trained weight
    "launches",  # kernels an optimizer step starts for each trained tensor
    "square",  # bytes of an attention matrix's entry
    "stall",  # share of the making of batches that the device waits for
    "step",  # seconds an optimizer step takes more
    "compiling",  # seconds of compiling, in units of the model's own
    "unpacking",  # seconds of dequantising, as a share of reading the weights from memory
    "loading",  # seconds of quantising, in units of the model's own
)
Cost = dict[str, float]
Costs = dict[str, dict[str, Cost]]
Form = Literal["full", "lora", "qlora"]

OPTIMIZERS: Costs = {
    "optimizer": {
        "adamw-loop": {"state": 8, "update": 44, "launches": 12},
        "adamw-foreach": {"state": 8, "update": 44, "copies": 1, "launches": 0.6},
        "adamw-fused": {"state": 8, "update": 28, "launches": 0.1},
        "adamw-8bit": {"state": 2.06, "update": 20, "launches": 1.5},
        "paged-adamw-8bit": {"state": 0.2, "update": 26, "launches": 1.6},
        "adamw-bnb-32bit": {"state": 8, "update": 28, "launches": 1},
        "paged-adamw-32bit": {"state": 0.5, "update": 60, "launches": 1.1},
        "adamw-torchao-8bit": {"state": 2.06, "update": 24, "launches": 2, "compiling": 0.6},
        "adamw-torchao-4bit": {"state": 1.06, "update": 26, "launches": 2, "compiling": 0.6},
        "adamw-torchao-fp8": {"state": 2.06, "update": 24, "launches": 2, "compiling": 0.6},
        "adamw-stochastic-rounding": {"state": 4, "update": 24, "launches": 2, "compiling": 0.6},
        "apex-fused-adam": {"state": 8, "update": 28, "launches": 0.1},
        "anyprecision": {"state": 6, "update": 40, "launches": 14},
        "adafactor": {"state": 0.1, "update": 40, "launches": 16},
    }
}
SHARED: Costs = {
    "kernels": {"liger": {"elementwise": 0.72, "kernels": 0.7, "activations": 0.85}},
    "normalisation": {
        "low-precision": {"elementwise": 0.9, "activations": 0.97, "kernels": 1.05},
        "apex-fused": {"elementwise": 0.92, "kernels": 0.95},
    },
    "head": {
        "logits": {},
        "chunked": {"head": 1.12, "logits": 0.08, "kernels": 1.02},
        "cut-cross-entropy": {"head": 0.85, "logits": 0.02, "compiling": 0.1},
        "liger": {"head": 1.0, "logits": 0.1, "kernels": 1.03},
    },
    "vocabulary": {"multiple-8": {"head": 1.01}, "multiple-64": {"head": 1.012}},
    "checkpointing": {
        "full": {"activations": 0.12, "recompute": 1.0, "kernels": 1.3},
        "every-2": {"activations": 0.56, "recompute": 0.5, "kernels": 1.15},
        "every-4": {"activations": 0.78, "recompute": 0.25, "kernels": 1.08},
        "selective": {"activations": 0.45, "recompute": 0.3, "kernels": 1.35},
        "offloaded": {"activations": 0.06, "recompute": 1.0, "transfer": 4, "kernels": 1.35},
    },
    "compile": {
        "per-layer": {"elementwise": 0.55, "kernels": 0.5, "activations": 0.8, "compiling": 1},
        "per-layer-max-autotune": {
            "elementwise": 0.54,
            "matmul": 0.98,
            "kernels": 0.5,
            "activations": 0.8,
            "compiling": 6,
        },
        "whole": {"elementwise": 0.52, "kernels": 0.42, "activations": 0.78, "compiling": 3, "attention": 1.5},
        "whole-reduce-overhead": {
            "elementwise": 0.52,
            "kernels": 0.05,
            "activations": 0.8,
            "compiling": 6,
            "attention": 1.5,
            "fragments": 1.08,
        },
    },
    "activations": {
        "half": {"activations": 0.6, "recompute": 0.15},
        "fifth": {"activations": 0.35, "recompute": 0.45},
    },
    "quantization": {
        "nf4-double": {"frozen": 0.516, "unpacking": 2.6, "loading": 1},
        "nf4": {"frozen": 0.5625, "unpacking": 2.3, "loading": 0.9},
        "int8": {"frozen": 1.0, "unpacking": 2.0, "loading": 0.6, "matmul": 1.15},
        "torchao-int8": {"frozen": 2.6, "unpacking": 1.2, "loading": 0.4},
        "torchao-float8": {"frozen": 2.6, "unpacking": 1.3, "loading": 0.4},
    },
    "projections": {
        "peft": {},
        "without-cast": {"elementwise": 0.94, "activations": 0.97, "kernels": 0.93},
        "fused": {"elementwise": 0.88, "activations": 0.95, "kernels": 0.8},
    },
    "adapter": {
        "base-dtype": {"elementwise": 0.94, "kernels": 0.95},
        "attention-only": {"elementwise": 0.9, "kernels": 0.85, "activations": 0.9},
    },
    "loading": {"ahead": {"stall": 0.15}, "workers-2": {"stall": 0.05, "step": 5e-4}, "workers-4": {"stall": 0.04}},
    "allocator": {"default": {"fragments": 1.08}, "expandable": {"fragments": 1.02}},
    "cache": {"emptied": {"fragments": 0.97, "step": 0.02}},
    "float8": {
        "tensorwise": {"matmul": 0.66, "elementwise": 1.1, "kernels": 1.3},
        "rowwise": {"matmul": 0.74, "elementwise": 1.1, "kernels": 1.3},
        "rowwise-high-precision-gradients": {"matmul": 0.82, "elementwise": 1.1, "kernels": 1.3},
    },
    "batching": {"token-budget": {"fragments": 1.02}, "padding-free": {"fragments": 1.01}},
    "experts": {},
    "padding": {},
    "evaluation": {},
    **OPTIMIZERS,
}
ATTENTION: dict[str, dict[str, Cost]] = {
    "cuda": {
        "eager": {"attention": 4.0, "square": 8.0, "kernels": 1.1},
        "sdpa": {"attention": 1.25},
        "sdpa-flash": {"attention": 1.2},
        "sdpa-efficient": {"attention": 1.4},
        "sdpa-cudnn": {"attention": 1.0},
        "flex": {"attention": 1.15, "compiling": 0.8, "kernels": 1.05},
        "varlen": {"attention": 1.05, "kernels": 1.05, "step": 2e-4},
        "flash-attention-2": {"attention": 1.05, "kernels": 1.1},
        "flash-attention-3": {"attention": 0.7, "kernels": 1.1},
    },
    "cpu": {
        "eager": {"attention": 1.25, "square": 8.0, "elementwise": 0.99},
        "sdpa": {"attention": 1.0},
        "sdpa-flash": {"attention": 1.02},
        "varlen": {"attention": 2.5},
    },
}
# Seconds of matmuls and of attention, bytes a number: fp32, a 16-bit format under autocast, and pure.
SIXTEEN_MIXED: Cost = {"elementwise": 0.68, "activations": 0.6, "kernels": 1.35}
SIXTEEN_PURE: Cost = {"elementwise": 0.5, "activations": 0.5}


def precision(device: str, speed: Mapping[str, float], method: Form, checkpoint: str) -> dict[str, Cost]:
    """The costs of the precision's choices; `speed` is that of matmuls by format, relative to fp32."""
    frozen16, attention16 = (0.0 if method == "qlora" else 2.0), 0.5
    frozen32 = 0.0 if method == "qlora" else 4.0
    mixed = {
        "matmul": 1 / speed["16"],
        "attention": attention16 * (1.0 if device == "cuda" else 1.4),
        "frozen": frozen16,
        "trained": 4.0 if method != "full" else 6.0,
        **SIXTEEN_MIXED,
    }
    full = {"frozen": frozen32, "trained": 4.0}
    pure = {"matmul": 1 / speed["16"], "attention": attention16, "frozen": frozen16, "trained": 2.0, **SIXTEEN_PURE}
    uncached = {**mixed, "trained": 4.0, "kernels": 1.5, "elementwise": 0.74, "activations": 0.58}
    sixteen = {"fp32": full, "bf16": pure}[checkpoint]
    if checkpoint == "bf16" and method != "full":
        sixteen = {**pure, "trained": 4.0, "kernels": 1.2, "elementwise": 0.6}
    return {
        "checkpoint": sixteen,
        "fp32": full,
        "tf32": {**full, "matmul": 1 / speed["tf32"]},
        "fp32-medium": {**full, "matmul": 1 / speed["medium"]},
        "bf16-mixed": mixed,
        "bf16-mixed-uncached": uncached,
        "fp16-mixed": {**mixed, "step": 5e-4},
        "bf16": pure,
        "fp16": pure,
    }


def complete(costs: Mapping[str, Mapping[str, Cost]]) -> Costs:
    """Every choice of every lever, those without costs of their own with none."""
    return {
        name: {choice: dict(costs.get(name, {}).get(choice, {})) for choice in lever.names}
        for name, lever in LEVERS.items()
    }
