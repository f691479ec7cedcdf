"""LoRA projections that share their input, as one autograd function: a candidate, kept here until a GPU says it pays.

peft runs every projection by itself: it casts the input to the adapter's fp32, autocast casts it back, and each adds
its own small products. Here the A matrices of all projections are one product, the B products are added to the base's
output in place, and the backward pass adds up in place as well. The mathematics is that of Hu et al. 2021
(arXiv 2106.09685): y = x W' + s (x A') B'.
"""

from __future__ import annotations

from typing import Any

import torch


class SharedInput(torch.autograd.Function):  # type: ignore[misc]
    """x [tokens, in] through frozen weights [out, in] with adapters A [r, in], B [out, r]; a tuple of [tokens, out]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: float, weights: tuple[torch.Tensor, ...], *adapters: torch.Tensor
    ) -> Any:
        """`adapters` are all A, then all B, in any floating dtype; computed in the weights' dtype."""
        count, dtype = len(weights), weights[0].dtype
        x = x.to(dtype)
        first = torch.cat([a.to(dtype) for a in adapters[:count]])
        second = [b.to(dtype) for b in adapters[count:]]
        inner = x @ first.t()
        ranks = [a.shape[0] for a in adapters[:count]]
        parts = inner.split(ranks, dim=1)
        outputs = tuple(
            (x @ weight.t()).addmm_(part, b.t(), alpha=scale)
            for weight, part, b in zip(weights, parts, second, strict=True)
        )
        ctx.save_for_backward(x, inner, first, *second)
        ctx.weights, ctx.scale, ctx.ranks = weights, scale, ranks
        ctx.dtypes = [adapter.dtype for adapter in adapters]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Gradients of x and of every adapter."""
        x, inner, first, *second = ctx.saved_tensors
        scale, parts = ctx.scale, inner.split(ctx.ranks, dim=1)
        through = torch.cat([(grad @ b).mul_(scale) for grad, b in zip(grads, second, strict=True)], dim=1)
        into = through @ first
        for grad, weight in zip(grads, ctx.weights, strict=True):
            into.addmm_(grad, weight)
        firsts = (through.t() @ x).split(ctx.ranks)
        seconds = [(grad.t() @ part).mul_(scale) for grad, part in zip(grads, parts, strict=True)]
        found = [one.to(dtype) for one, dtype in zip([*firsts, *seconds], ctx.dtypes, strict=True)]
        return into, None, None, *found


def together(x: torch.Tensor, projections: list[Any]) -> tuple[torch.Tensor, ...]:
    """Outputs of peft's LoRA linears without bias and dropout, which share x [..., in] and a scale."""
    weights = tuple(one.base_layer.weight for one in projections)
    (scale,) = {one.scaling["default"] for one in projections}
    adapters = [one.lora_A["default"].weight for one in projections] + [
        one.lora_B["default"].weight for one in projections
    ]
    flat = SharedInput.apply(x.reshape(-1, x.shape[-1]), scale, weights, *adapters)
    return tuple(one.view(*x.shape[:-1], -1) for one in flat)
