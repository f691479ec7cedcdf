"""torch.compile."""

from __future__ import annotations

from typing import Any

import torch

# The most kinds of batch that code is compiled for; beyond torch's own limit, 8, a run would go on uncompiled. Dynamic
# shapes have several kinds too: with and without a mask, one row and more, in training and in evaluation, and each of
# these once more for layers whose input has no gradient, or that are checkpointed.
MOST_KINDS = 64


def layers_of(model: Any) -> list[Any]:
    """The modules of the longest ModuleList, which is a transformer's list of layers, whatever its name."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
    return list(max(lists, key=len, default=()))


def set_compiler_up() -> None:
    """Let torch compile for MOST_KINDS of batch, and switch inductor's mix-order reductions off.

    With these, chained norms get silently wrong gradients (https://github.com/pytorch/pytorch/issues/193061, from
    torch 2.10 on).
    """
    from torch._inductor import config

    torch._dynamo.config.recompile_limit = MOST_KINDS
    if hasattr(config.triton, "mix_order_reduction"):
        config.triton.mix_order_reduction = False


def compile_layers(model: Any, **options: Any) -> None:
    """Compile each layer in place, for all shapes; compiling the whole model would build sdpa's dense mask."""
    set_compiler_up()
    for layer in layers_of(model):
        layer.compile(dynamic=True, **options)


def compile_whole(model: Any, **options: Any) -> None:
    """Compile the whole model in place, for all shapes."""
    set_compiler_up()
    model.compile(dynamic=True, **options)


def compile_in_graphs(model: Any, **options: Any) -> None:
    """Compile the whole model in place, for each shape by itself, and record it in CUDA graphs."""
    set_compiler_up()
    own_gradients(model)
    model.compile(dynamic=False, **options)


def own_gradients(model: Any) -> None:
    """Keep the gradients of all trained parameters in memory of their own.

    Autograd takes a step's first gradient as a parameter's `grad` without a copy: in a graph's memory, which the graph
    of the next micro batch overwrites (https://github.com/pytorch/pytorch/issues/169545). Later ones are added to it.
    """
    owned: dict[torch.Tensor, torch.Tensor] = {}

    def own(parameter: torch.Tensor) -> None:
        if parameter not in owned:
            owned[parameter] = parameter.grad.clone()
        elif parameter.grad is not owned[parameter]:
            owned[parameter].copy_(parameter.grad)
        parameter.grad = owned[parameter]

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(own)
