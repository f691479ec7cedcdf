"""Computes the linear layers that carry a LoRA adapter: without needless casts, or several at once.

The mathematics of the fused function is that of Hu et al. 2021 (arXiv 2106.09685): y = x W' + s (x A') B'.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

SHARED = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"))  # have one input


def without_cast(model: Any) -> None:
    """Leave the input of every adapter as it is under autocast, which casts it where matmuls need that.

    ValueError where peft has no method of that name for the cast.
    """
    for module in model.modules():
        if isinstance(module, LoraLayer):
            if not hasattr(module, "_cast_input_dtype"):
                raise ValueError("this release of peft casts the inputs of adapters elsewhere, so the cast stays")
            module._cast_input_dtype = MethodType(cast_without_autocast, module)


def cast_without_autocast(_: Any, x: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """peft's cast of an adapter's input, which without autocast has to be in the format of the adapter's weights."""
    return x if x is None or torch.is_autocast_enabled(x.device.type) else x.to(dtype)


def fused_projections(model: Any) -> None:
    """Compute projections that share their input together, and every other one in the same way by itself.

    ValueError where none can be fused: adapters have dropout, or are on no linear layers.
    """
    fused = 0
    for parent in model.modules():
        groups: list[list[Any]] = [[getattr(parent, name, None) for name in names] for names in SHARED]
        groups = [one for one in groups if all(map(fits, one)) and len({each.in_features for each in one}) == 1]
        done = [one for group in groups for one in group]
        alone = [[child] for child in parent.children() if fits(child) and not any(child is one for one in done)]
        for group in groups + alone:
            fuse(group)
            fused += 1
    if not fused:
        raise ValueError(
            "this model has no projection that can be fused: adapters have dropout, or are on no linear layers"
        )


def fits(projection: Any) -> bool:
    """Whether it is a plain LoRA layer over a frozen linear one: no dropout, no other form of adapter."""
    if not isinstance(projection, LoraLayer) or "default" not in getattr(projection, "lora_A", {}):
        return False
    base, dropout = projection.base_layer, projection.lora_dropout["default"]
    return (
        isinstance(base, torch.nn.Linear)
        and not any(one.requires_grad for one in base.parameters())
        and isinstance(dropout, torch.nn.Identity)
        and not projection.lora_variant
        and projection.lora_B["default"].bias is None
    )


def fuse(group: list[Any]) -> None:
    """Have the first of a group that is called compute all of them, and the others give what it has computed."""
    waiting: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # place in the group -> its input, its output

    def forward_of(place: int) -> Any:
        def forward(_: Any, x: torch.Tensor, *__: Any, **___: Any) -> torch.Tensor:
            given, output = waiting.pop(place, (None, None))
            if given is x and output is not None:
                return output
            outputs = together(x, group)
            waiting.clear()
            waiting.update({at: (x, one) for at, one in enumerate(outputs) if at != place})
            return outputs[place]

        return forward

    for place, projection in enumerate(group):
        projection.forward = MethodType(forward_of(place), projection)


def together(x: torch.Tensor, projections: list[Any]) -> tuple[torch.Tensor, ...]:
    """The outputs [..., out] of LoRA layers that `fits`, for their input x [..., in]."""
    bases = tuple(one.base_layer for one in projections)
    scales = tuple(one.scaling["default"] for one in projections)
    adapters = [one.lora_A["default"].weight for one in projections]
    adapters += [one.lora_B["default"].weight for one in projections]
    flat = SharedInput.apply(x.reshape(-1, x.shape[-1]), bases, scales, *adapters)
    return tuple(one.view(*x.shape[:-1], -1) for one in flat)


def dense(base: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight of a linear layer [out, in], dequantised where it is one of bitsandbytes' 4-bit layers."""
    state = getattr(base.weight, "quant_state", None)
    if state is None:
        return base.weight.to(dtype)
    from bitsandbytes.functional import dequantize_4bit

    weight: torch.Tensor = dequantize_4bit(base.weight.data, state)
    return weight.to(dtype)


def with_bias(output: torch.Tensor, base: Any) -> torch.Tensor:
    """The output of a linear layer's weight, with its bias added in place if it has one."""
    return output if base.bias is None else output.add_(base.bias.to(output.dtype))


class SharedInput(torch.autograd.Function):  # type: ignore[misc]
    """x [tokens, in] through frozen linear layers [out, in] with adapters A [r, in], B [out, r]; [tokens, out] of each.

    The A matrices of all are one product. A dequantised weight is not kept for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bases: tuple[Any, ...], scales: tuple[float, ...], *adapters: torch.Tensor
    ) -> Any:
        """`adapters` are all A, then all B. All is computed in autocast's dtype, or in that of the weights without."""
        count, kind = len(bases), x.device.type
        dtype = bases[0].weight.dtype if bases[0].weight.is_floating_point() else bases[0].compute_dtype or x.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        narrow = x.to(dtype)
        first = torch.cat([one.to(dtype) for one in adapters[:count]])
        second = [one.to(dtype) for one in adapters[count:]]
        inner = narrow @ first.t()
        ranks = [one.shape[0] for one in adapters[:count]]
        parts = inner.split(ranks, dim=1)
        outputs = tuple(
            with_bias(narrow @ dense(base, dtype).t(), base).addmm_(part, b.t(), alpha=scale)
            for base, part, b, scale in zip(bases, parts, second, scales, strict=True)
        )
        ctx.save_for_backward(narrow, inner, first, *second)
        ctx.bases, ctx.scales, ctx.ranks = bases, scales, ranks
        ctx.dtypes = [x.dtype, *(one.dtype for one in adapters)]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Gradients of x and of every adapter."""
        x, inner, first, *second = ctx.saved_tensors
        grads = tuple(grad.to(x.dtype) for grad in grads)
        pairs = zip(grads, second, ctx.scales, strict=True)
        through = torch.cat([(grad @ b).mul_(scale) for grad, b, scale in pairs], dim=1)
        into = None
        if ctx.needs_input_grad[0]:
            into = through @ first
            for grad, base in zip(grads, ctx.bases, strict=True):
                into.addmm_(grad, dense(base, x.dtype))
        firsts = (through.t() @ x).split(ctx.ranks)
        parts = inner.split(ctx.ranks, dim=1)
        seconds = [(grad.t() @ part).mul_(scale) for grad, part, scale in zip(grads, parts, ctx.scales, strict=True)]
        of_x, *dtypes = ctx.dtypes
        learnt = [one.to(dtype) for one, dtype in zip([*firsts, *seconds], dtypes, strict=True)]
        return None if into is None else into.to(of_x), None, None, *learnt
