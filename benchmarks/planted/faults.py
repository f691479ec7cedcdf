"""Faults as a kernel, an optimizer or a batching may have them. Each is planted into the process that trains.

A plant is given an object with the `setattr` of pytest's `monkeypatch`, so that a test can take the fault out again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers.models.llama import modeling_llama

from training import batches, evaluation, optimization, step
from training.recipe import task_of
from training.samples import IGNORED
from worker.child import arrange, build

OVERFLOWS_AFTER, FAST_STEPS = 20, 3  # steps
LEAK_BYTES = 5 << 20  # a step


class Patch(Protocol):
    """Replaces attributes of modules."""

    def setattr(self, target: Any, name: str, value: Any, /) -> None:
        """Set the attribute."""


class Forever:
    """A patch that lasts as long as the process."""

    def setattr(self, target: Any, name: str, value: Any, /) -> None:
        """Set the attribute."""
        setattr(target, name, value)


Plant = Callable[[Patch], None]


def wrapped_optimizer(change: Callable[[Any], None]) -> Plant:
    """Changes every optimizer that is made."""

    def plant(patch: Patch) -> None:
        def faulty(model: Any, recipe: Any) -> Any:
            optimizer = optimization.make_optimizer(model, recipe)
            change(optimizer)
            return optimizer

        patch.setattr(build, "make_optimizer", faulty)

    return plant


def gradients_times(matrix: str, factor: float) -> Plant:
    """Multiplies the gradient of the first trained matrix whose name holds `matrix`, as a wrong kernel may."""

    def plant(patch: Patch) -> None:
        def faulty(model: Any, recipe: Any) -> Any:
            optimizer = optimization.make_optimizer(model, recipe)
            every = [one for name, one in model.named_parameters() if matrix in name and one.requires_grad]
            if not every[0]._backward_hooks:  # an optimizer is made more than once
                every[0].register_hook(lambda gradient: gradient * factor)
            return optimizer

        patch.setattr(build, "make_optimizer", faulty)

    return plant


def stepping(when: Callable[[int], bool]) -> Callable[[Any], None]:
    """Has an optimizer take only some of its steps."""

    def change(optimizer: Any) -> None:
        take, count = optimizer.step, iter(range(1_000_000))

        def sometimes(*arguments: Any) -> None:
            if when(next(count)):
                take(*arguments)

        optimizer.step = sometimes

    return change


def after_each_step(what: Callable[[Any, int], None]) -> Callable[[Any], None]:
    """Calls `what` with the optimizer and the number of the step, from 1 on, after each of its steps."""

    def change(optimizer: Any) -> None:
        take, count = optimizer.step, iter(range(1, 1_000_000))

        def more(*arguments: Any) -> None:
            take(*arguments)
            what(optimizer, next(count))

        optimizer.step = more

    return change


def half_rate(optimizer: Any) -> None:
    """Half the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] /= 2


def no_decay(optimizer: Any) -> None:
    """Weight decay is ignored."""
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0


def overflowing(optimizer: Any, number: int) -> None:
    """A weight becomes infinite after some steps."""
    if number == OVERFLOWS_AFTER:
        optimizer.param_groups[0]["params"][0].data.fill_(float("inf"))


def leaking() -> Callable[[Any, int], None]:
    """Each step keeps some memory for good."""
    kept: list[torch.Tensor] = []

    def leak(optimizer: Any, number: int) -> None:
        kept.append(torch.ones(LEAK_BYTES, dtype=torch.uint8))

    return leak


def slowing() -> Callable[[Any, int], None]:
    """The first steps are fast, the others take twice as long."""
    last = [time.perf_counter()]

    def slow(optimizer: Any, number: int) -> None:
        if number > FAST_STEPS:
            time.sleep(time.perf_counter() - last[0])
        last[0] = time.perf_counter()

    return slow


def no_clipping(patch: Patch) -> None:
    """Gradients are not clipped, and their norm is right all the same."""
    patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda given, _: _norm([one.grad for one in given]))


def _norm(gradients: list[torch.Tensor | None]) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([one for one in gradients if one is not None])


def half_of_the_labels(patch: Patch) -> None:
    """As a head that cuts rows off: the loss of what is left is a mean over what is left."""

    def cut(recipe: Any) -> Any:
        task = task_of(recipe)

        class Cut:
            @staticmethod
            def summed_loss(model: Any, batch: Any, count: torch.Tensor) -> torch.Tensor:
                labels = batch["labels"].clone()
                labels[:, labels.shape[1] // 2 :] = IGNORED
                return task.summed_loss(model, batch | {"labels": labels}, count)

        return Cut

    patch.setattr(step, "task_of", cut)


def one_adapter_alone(patch: Patch) -> None:
    """As gradient checkpointing that loses the gradients of all layers but one."""
    real = step.forward_backward

    def lose(model: Any, *rest: Any) -> torch.Tensor:
        loss = real(model, *rest)
        trained = [one for one in model.parameters() if one.requires_grad]
        for one in trained[2:]:
            if one.grad is not None:
                one.grad.zero_()
        return loss

    patch.setattr(step, "forward_backward", lose)


def without_the_longest_tenth(patch: Patch) -> None:
    """A batching that leaves the longest samples of each step out."""
    real = batches.arranged

    def drop(order: Any, lengths: Any, *rest: Any) -> Any:
        kept = set(sorted(order, key=lambda one: lengths[one])[: -max(1, len(order) // 10)])
        return real([one for one in order if one in kept], lengths, *rest)

    patch.setattr(arrange, "arranged", drop)


def positions_go_on(patch: Patch) -> None:
    """Packed samples see those before them in their row."""
    real = batches.collate

    def collate(*given: Any) -> Any:
        batch = real(*given)
        rows, width = batch["input_ids"].shape
        return batch | {"position_ids": torch.arange(width).expand(rows, width)}

    patch.setattr(batches, "collate", collate)


def later_rows_go_on(patch: Patch) -> None:
    """Only the first of a micro batch's packed rows restarts its positions."""
    real = batches.collate

    def collate(*given: Any) -> Any:
        batch = real(*given)
        rows, width = batch["input_ids"].shape
        positions = torch.arange(width).repeat(rows, 1)
        positions[0] = batch["position_ids"][0]
        return batch | {"position_ids": positions}

    patch.setattr(batches, "collate", collate)


def the_last_micro_batch_alone(patch: Patch) -> None:
    """As CUDA graphs that write each micro batch's gradients over those of the one before."""
    real = step.forward_backward

    def overwrite(model: Any, *rest: Any) -> torch.Tensor:
        for one in model.parameters():
            one.grad = None
        return real(model, *rest)

    patch.setattr(step, "forward_backward", overwrite)


class InPlace(torch.autograd.Function):  # type: ignore[misc]
    """A rotary embedding that writes into the memory of its inputs [rows, heads, tokens, size], unseen by autograd.

    So do kernels that are handed pointers. Only fp32 on a CPU, whose memory is written through NumPy here.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        """Query and key, rotated."""
        ctx.save_for_backward(cos, sin)
        for one in (query, key):
            _rotate(one, cos, sin)
        return query.view_as(query), key.view_as(key)

    @staticmethod
    def backward(ctx: Any, query: torch.Tensor, key: torch.Tensor) -> Any:
        """Their gradients, rotated back."""
        cos, sin = ctx.saved_tensors
        query, key = query.clone(), key.clone()
        for one in (query, key):
            _rotate(one, cos, -sin)
        return query, key, None, None


def _rotate(tensor: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    plain = tensor.detach()
    first, second = plain.chunk(2, dim=-1)
    rotated = plain * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)
    plain.numpy()[...] = rotated.numpy()


def rotates_in_place(patch: Patch) -> None:
    """Queries and keys are rotated where they lie, and once more where checkpointing has kept them from before."""
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *given, **_: InPlace.apply(*given[:4]))


def evaluation_without_memory(patch: Patch) -> None:
    """An evaluation asks for more memory than there is, as one whose logits are all kept does."""

    def evaluate(*given: Any) -> dict[str, float]:
        torch.empty(1 << 60, dtype=torch.uint8)
        raise AssertionError("no machine has as much")

    patch.setattr(evaluation, "evaluate", evaluate)
