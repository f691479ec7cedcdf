"""Optimizers, each made from parameter groups and a learning rate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch


def adamw(groups: list[dict[str, Any]], rate: float, **implementation: bool) -> torch.optim.Optimizer:
    """torch's AdamW: `foreach`, `fused`, or neither."""
    return torch.optim.AdamW(groups, lr=rate, **implementation)


def sgd(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """torch's SGD without momentum, as Trainer has it."""
    return torch.optim.SGD(groups, lr=rate)


def bitsandbytes_optimizer(groups: list[dict[str, Any]], rate: float, name: str) -> torch.optim.Optimizer:
    """An optimizer of bitsandbytes by its class name."""
    import bitsandbytes

    made: torch.optim.Optimizer = getattr(bitsandbytes.optim, name)(groups, lr=rate)
    return made


def stable_embedding_optimizer(groups: list[dict[str, Any]], rate: float, name: str) -> torch.optim.Optimizer:
    """The same, the states of embeddings in 32 bits, as bitsandbytes' StableEmbedding and Trainer have them."""
    import bitsandbytes

    class Stable(getattr(bitsandbytes.optim, name)):  # type: ignore[misc]
        def get_config(self, number: int, at: int, group: dict[str, Any]) -> dict[str, Any]:
            config: dict[str, Any] = super().get_config(number, at, group)
            return config | ({"optim_bits": 32} if at in group["embeddings"] else {})

    made: torch.optim.Optimizer = Stable(groups, lr=rate)
    return made


def torchao_optimizer(groups: list[dict[str, Any]], rate: float, name: str, **more: bool) -> torch.optim.Optimizer:
    """An optimizer of torchao by its class name. A scalar learning rate, so that it may change at every step."""
    kind = getattr(import_module("torchao.optim"), name)
    made: torch.optim.Optimizer = kind(groups, lr=torch.tensor(rate), **more)
    return made


def apex_adamw(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """Apex's FusedAdam in its AdamW mode."""
    made: torch.optim.Optimizer = import_module("apex.optimizers").FusedAdam(groups, lr=rate, adam_w_mode=True)
    return made


def anyprecision(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """torchdistx's AnyPrecisionAdamW with Kahan summation."""
    kind = import_module("torchdistx.optimizers").AnyPrecisionAdamW
    states = {"momentum_dtype": torch.bfloat16, "variance_dtype": torch.bfloat16}
    made: torch.optim.Optimizer = kind(groups, lr=rate, use_kahan_summation=True, **states)
    return made


def adafactor(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """transformers' Adafactor at a given learning rate, as Trainer has it."""
    from transformers.optimization import Adafactor

    made: torch.optim.Optimizer = Adafactor(groups, lr=rate, scale_parameter=False, relative_step=False)
    return made


def galore_adamw(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """GaLore: matrices have their gradients projected, vectors have not."""
    low_rank = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
    for group in groups:
        if group["params"][0].ndim == 2:
            group.update(low_rank)
    made: torch.optim.Optimizer = import_module("galore_torch").GaLoreAdamW(groups, lr=rate)
    return made


class OffloadedAdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """AdamW in host memory (ZeRO-Offload, Ren et al. 2021): gradients go down, the update is made there, weights go up.

    The device keeps no states; the host keeps fp32 copies of the weights beside them.
    """

    def __init__(self, groups: list[dict[str, Any]], rate: float) -> None:
        super().__init__(groups, {"lr": rate})
        self._pairs = [(one, self._host(one.detach())) for group in self.param_groups for one in group["params"]]
        there = dict(self._pairs)
        copies = [group | {"params": [there[one] for one in group["params"]]} for group in self.param_groups]
        self._adamw = torch.optim.AdamW(copies, lr=rate, fused=True)
        self.state = self._adamw.state

    @staticmethod
    def _host(tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.empty(tensor.shape, dtype=torch.float32, pin_memory=tensor.device.type == "cuda")
        return copy.copy_(tensor)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        """Down, update, up; each transfer is in order with the device's work."""
        del closure
        for group, copy in zip(self.param_groups, self._adamw.param_groups, strict=True):
            copy["lr"] = group["lr"]
        for ours, theirs in self._pairs:
            if ours.grad is None:
                theirs.grad = None
            elif theirs.grad is None:
                theirs.grad = self._host(ours.grad)
            else:
                theirs.grad.copy_(ours.grad, non_blocking=True)
        for device in {ours.device for ours, _ in self._pairs if ours.device.type == "cuda"}:
            torch.cuda.synchronize(device)  # the update reads what the copies write
        self._adamw.step()
        for ours, theirs in self._pairs:
            ours.copy_(theirs, non_blocking=True)


def offloaded_adamw(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """AdamW whose states and update are the host's."""
    return OffloadedAdamW(groups, rate)


class InBackwardAdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """AdamW that updates each weight as soon as its gradient is there, and drops the gradient.

    Gradients never exist all at once (torch's tutorial "optimizer step in backward"). So nothing can be clipped, a step
    is one micro batch, and the gradient norm is summed up on the way.
    """

    def __init__(self, groups: list[dict[str, Any]], rate: float) -> None:
        super().__init__(groups, {"lr": rate})
        self._held = False
        self._squares: list[torch.Tensor] = []
        self._hooks = [
            one.register_post_accumulate_grad_hook(self._updater(one, group))
            for group in self.param_groups
            for one in group["params"]
        ]

    def _updater(self, weight: torch.Tensor, group: dict[str, Any]) -> Any:
        inner = torch.optim.AdamW([weight], lr=group["lr"], weight_decay=group["weight_decay"], fused=True)
        inner.state = self.state

        def update(one: torch.Tensor) -> None:
            if one.grad is None:
                return
            self._squares.append(torch.linalg.vector_norm(one.grad, dtype=torch.float32).square())
            if not self._held:
                inner.param_groups[0]["lr"] = group["lr"]
                inner.step()
            one.grad = None

        return update

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within, gradients are measured and dropped, and nothing is updated."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def norm(self) -> torch.Tensor:
        """The gradient norm of what was updated since the last call."""
        squares, self._squares = self._squares, []
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())

    def release(self) -> None:
        """Take the hooks off, so that another optimizer may have the weights."""
        for hook in self._hooks:
            hook.remove()

    def step(self, closure: Any = None) -> None:
        """Nothing: it is done."""
        del closure


def in_backward_adamw(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """AdamW stepped during the backward pass."""
    return InBackwardAdamW(groups, rate)
