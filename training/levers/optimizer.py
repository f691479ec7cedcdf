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
    """torch's SGD without momentum, as transformers' Trainer makes it."""
    return torch.optim.SGD(groups, lr=rate)


def bitsandbytes_optimizer(groups: list[dict[str, Any]], rate: float, name: str) -> torch.optim.Optimizer:
    """An optimizer of bitsandbytes by its class name."""
    import bitsandbytes

    made: torch.optim.Optimizer = getattr(bitsandbytes.optim, name)(groups, lr=rate)
    return made


def paged_optimizer(groups: list[dict[str, Any]], rate: float, name: str) -> torch.optim.Optimizer:
    """A paged optimizer of bitsandbytes, whose states are in pages again after a checkpoint was loaded.

    bitsandbytes itself would move them to the device for good, where they may not fit.
    """
    import bitsandbytes

    class Paged(getattr(bitsandbytes.optim, name)):  # type: ignore[misc]
        def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = False) -> None:
            super().load_state_dict(state_dict, move_to_device=move_to_device)
            for weight, state in self.state.items():
                for key, value in state.items():
                    if key in ("state1", "state2"):
                        state[key] = self.get_state_buffer(weight, dtype=value.dtype).copy_(value)
                    elif isinstance(value, torch.Tensor):
                        state[key] = value.to(weight.device)

    made: torch.optim.Optimizer = Paged(groups, lr=rate)
    return made


def stable_embedding_optimizer(
    groups: list[dict[str, Any]], rate: float, name: str, embeddings: int
) -> torch.optim.Optimizer:
    """A bitsandbytes optimizer with embeddings' states in `embeddings` bits, as StableEmbedding has them."""
    import bitsandbytes

    class Stable(getattr(bitsandbytes.optim, name)):  # type: ignore[misc]
        def get_config(self, number: int, at: int, group: dict[str, Any]) -> dict[str, Any]:
            config: dict[str, Any] = super().get_config(number, at, group)
            return config | ({"optim_bits": embeddings} if at in group["embeddings"] else {})

    made: torch.optim.Optimizer = Stable(groups, lr=rate)
    return made


def torchao_optimizer(groups: list[dict[str, Any]], rate: float, name: str, **more: bool) -> torch.optim.Optimizer:
    """An optimizer of torchao by its class name. Its learning rate is a tensor, so that it may change at each step."""
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
    return loaded_as_saved(kind(groups, lr=rate, use_kahan_summation=True, **states))


def adafactor(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """transformers' Adafactor at a given learning rate, as its Trainer makes it."""
    from transformers.optimization import Adafactor

    return loaded_as_saved(Adafactor(groups, lr=rate, scale_parameter=False, relative_step=False))


def loaded_as_saved(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, which loads states in the formats they were saved in; torch would give them the weights'."""
    saved: dict[int, dict[str, Any]] = {}

    def remember(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        saved.update(state_dict["state"])

    def restore(loaded: torch.optim.Optimizer) -> None:
        weights = [one for group in loaded.param_groups for one in group["params"]]
        for number, state in saved.items():
            now = loaded.state[weights[number]]
            tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            now |= {name: value.to(now[name].device) for name, value in tensors.items()}
        saved.clear()

    optimizer.register_load_state_dict_pre_hook(remember)
    optimizer.register_load_state_dict_post_hook(restore)
    return optimizer


def galore_adamw(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """GaLore's AdamW: the gradients of matrices are projected to a low rank, those of vectors are not."""
    low_rank = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
    for group in groups:
        if group["params"][0].ndim == 2:
            group.update(low_rank)
    made: torch.optim.Optimizer = import_module("galore_torch").GaLoreAdamW(groups, lr=rate, eps=1e-8)
    # Its state contains GaLoreProjector objects; torch.load(weights_only=True) reads them only if the class is
    # registered as safe.
    torch.serialization.add_safe_globals([import_module("galore_torch.galore_projector").GaLoreProjector])
    return made


class OffloadedAdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """AdamW in host memory (ZeRO-Offload, Ren et al. 2021): gradients go to the host, updated weights come back.

    The device keeps no optimizer states; the host keeps them, and fp32 copies of the weights. What is saved are the
    states of torch's AdamW, and the copies once they have been updated.
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
        copy = torch.empty(tensor.shape, dtype=torch.float32, pin_memory=tensor.is_cuda)
        return copy.copy_(tensor)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        """Copy gradients to the host, update there, copy weights back; copies are in order with the device's work."""
        del closure
        self._pass_on_settings()
        for ours, theirs in self._pairs:
            if ours.grad is None:
                theirs.grad = None
            elif theirs.grad is None:
                theirs.grad = self._host(ours.grad)
            else:
                theirs.grad.copy_(ours.grad, non_blocking=True)
        for device in {ours.device for ours, _ in self._pairs if ours.is_cuda}:
            torch.cuda.synchronize(device)  # the update reads what the copies write
        self._adamw.step()
        for ours, theirs in self._pairs:
            ours.copy_(theirs, non_blocking=True)

    def _pass_on_settings(self) -> None:
        for group, copy in zip(self.param_groups, self._adamw.param_groups, strict=True):
            copy.update({name: value for name, value in group.items() if name != "params"})

    def state_dict(self) -> dict[str, Any]:
        """The states, the settings that a scheduler has changed, and the copies."""
        self._pass_on_settings()
        copies = [theirs for _, theirs in self._pairs] if self.state else []
        return {**self._adamw.state_dict(), "copies": copies}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what was saved; without copies, the weights are copied again, as they may have been loaded."""
        self._adamw.load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        self.state = self._adamw.state
        for group, copy in zip(self.param_groups, self._adamw.param_groups, strict=True):
            group.update({name: value for name, value in copy.items() if name != "params"})
        saved = state_dict["copies"] or [ours for ours, _ in self._pairs]
        for (ours, theirs), copy in zip(self._pairs, saved, strict=True):
            ours.copy_(theirs.copy_(copy))


def offloaded_adamw(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """AdamW with its states and its update on the host."""
    return OffloadedAdamW(groups, rate)


class InBackwardAdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """AdamW that updates each weight as soon as its gradient is computed, and drops the gradient.

    Gradients never exist all at once (torch's tutorial "optimizer step in backward"). So nothing can be clipped, a step
    is a single micro batch, and the gradient norm is summed up during the backward pass.
    """

    def __init__(self, groups: list[dict[str, Any]], rate: float) -> None:
        super().__init__(groups, {"lr": rate, "fused": True})  # so that counts of steps are loaded as fused ones
        self._held = False
        self._squares: list[torch.Tensor] = []
        self._hooks = [
            one.register_post_accumulate_grad_hook(self._updater(one, number))
            for number, group in enumerate(self.param_groups)
            for one in group["params"]
        ]

    def _updater(self, weight: torch.Tensor, number: int) -> Any:
        decay = self.param_groups[number]["weight_decay"]
        inner = torch.optim.AdamW([weight], weight_decay=decay, fused=True)

        def update(one: torch.Tensor) -> None:
            if one.grad is None:
                return
            self._squares.append(torch.linalg.vector_norm(one.grad, dtype=torch.float32).square())
            if not self._held:
                inner.state = self.state  # loading a checkpoint replaces this, and the groups
                inner.param_groups[0]["lr"] = self.param_groups[number]["lr"]
                inner.step()
            one.grad = None

        return update

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A context in which gradients are added to the norm and dropped, and no weight is updated."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def norm(self) -> torch.Tensor:
        """The norm of the gradients that were computed since the last call."""
        squares, self._squares = self._squares, []
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())

    def release(self) -> None:
        """Remove the hooks, so that another optimizer may update the weights."""
        for hook in self._hooks:
            hook.remove()

    def step(self, closure: Any = None) -> None:
        """Nothing: the backward pass has updated the weights."""
        del closure


def in_backward_adamw(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """AdamW stepped during the backward pass."""
    return InBackwardAdamW(groups, rate)
