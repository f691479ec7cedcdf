"""Replays optimizer steps: from the first weights on, without dropout, watching what happens to the trained weights.

A candidate arranges samples by its own batching. The reference then trains the same samples in each step, one sample a
row, so that batchings which put other samples in a step are compared as exactly as the others. Its micro batches have
at most the tokens of one longest sample: they take no more memory than that one, and as few launches as that allows.
"""

from __future__ import annotations

import math
import random
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from service.contract.child import FIRST_ROWS, RunReplay
from service.contract.replay import Replay
from training.levers.batching import longest_first, token_budget
from training.samples import IGNORED, Batch, Step
from worker.child import steps
from worker.child.arrange import plan_of
from worker.child.build import Bundle
from worker.child.data import work_unit

Steps = tuple[tuple[int, ...], ...]  # the samples of each

WATCHED = 4096  # weights of each trained tensor, spread over it: a copy of all weights might not fit
COMPARED = 48  # values of the gradient of each trained matrix, spread over it
# Standard deviation of an adapter's matrices B, times its scaling and the square root of its rank: with peft's way of
# drawing A, what the adapter adds is then about a tenth of weights of the usual size.
STIRRED = 0.16
LONGEST_SHARE = 0.1  # of the samples are the longest of the data, because faults often show on long rows only


def run_replay(request: RunReplay, bundle: Bundle) -> Replay:
    """Train the request's steps on its first weights and say what happened. TrainingError and out of memory pass."""
    micro = request.candidate.micro_batch_size or 1
    if request.steps:
        given, plan = followed(request.steps, bundle.data.lengths, micro)
    else:
        size = request.samples_a_step
        whole = size if bundle.recipe.steps_in_backward else micro
        given, plan = arranged(bundle, request.count, size, whole, request.seed, request.first_samples)
    return replay(bundle, plan, given, request.stirs)


def followed(given: Steps, lengths: list[int], micro: int) -> tuple[list[int], list[Step]]:
    """(samples, steps) as the reference trains what another's steps held: one sample a row, by length.

    A micro batch has at most the padded tokens of `micro` longest samples, so short rows share one.
    """
    plan = [step for samples in given for step in token_budget(samples, lengths, len(samples), micro)]
    return [sample for samples in given for sample in samples], plan


def arranged(
    bundle: Bundle, count: int, size: int, micro: int, seed: int, first: int = 0
) -> tuple[list[int], list[Step]]:
    """(samples, the candidate's steps of `size` samples each): `count` steps, unless its batching loses samples.

    If `first` is more than `size`, step 0 has so many samples. Where the data has fewer samples, it begins again with
    them, as the epochs of a run do: one step would prove little.
    """
    lengths, given, plan = bundle.data.lengths, list[int](), list[Step]()
    if first > size:
        given = samples(lengths, first, seed - 1, first)
        plan = plan_of(bundle, given, min(micro, FIRST_ROWS), effective=first)
        count -= 1
    epoch = len(lengths) // size * size
    for start in range(0, count * size, epoch):
        drawn = samples(lengths, min(epoch, count * size - start), seed + start, size)
        given += drawn
        plan += plan_of(bundle, drawn, micro, effective=size)
    return given, plan


def samples(lengths: list[int], count: int, seed: int, effective: int) -> list[int]:
    """`count` samples, the longest of the data among them, in random order."""
    longest = longest_first(range(len(lengths)), lengths)[: max(1, int(LONGEST_SHARE * count))]
    mixed = list(dict.fromkeys((*longest, *work_unit(lengths, count, seed, effective))))[:count]
    random.Random(seed).shuffle(mixed)
    return mixed


def replay(bundle: Bundle, plan: list[Step], given: list[int], stirs: bool = False) -> Replay:
    """Train a plan's steps on a bundle with untouched weights, but for what `stir_adapter` draws where it `stirs`."""
    if stirs:
        stir_adapter(bundle.model)
        steps.replace_optimizer(bundle)  # one that keeps a copy of the weights has copied the former ones
    watch, arrived = Watch(bundle.model), Arrived(bundle)
    losses, norms, terms, still = [], [], [], []
    with steps.without_dropout(bundle.model):
        for number, step in enumerate(plan):
            batches, count, _ = steps.prepare(bundle, step)
            terms.append(sum(map(_labels, batches)))
            result = steps.StepResult(*map(float, steps.optimizer_step(bundle, batches, count)))
            steps.check(bundle, result, number)
            arrived.first_is_over = True
            losses.append(result.loss)
            norms.append(result.grad_norm if math.isfinite(result.grad_norm) else None)
            if not watch.has_moved() and bundle.skipped == 0:
                still.append(number)
    arrived.end()
    return Replay(
        given=tuple(given),
        steps=tuple(tuple(sample for micro in step for row in micro for sample in row) for step in plan),
        terms=tuple(terms),
        losses=tuple(losses),
        grad_norms=tuple(norms),
        applied_norms=tuple(arrived.norms),
        gradients=arrived.gradients,
        still=tuple(still),
        moved=watch.moved(),
        shrunk=watch.shrunk(),
    )


def stir_adapter(model: torch.nn.Module) -> None:
    """Draw LoRA's matrices B, which begin at 0, the same in each replay.

    With zeros there, step 0 would tell nothing of the adapter: neither what it adds to the layers nor the gradients of
    its matrices A, which are all 0. What is added is small beside a layer's own weights, whatever rank and alpha are.
    """
    for name, layer in model.named_modules():
        for adapter, linear in layer.lora_B.items() if isinstance(layer, LoraLayer) else ():
            drawn = torch.Generator().manual_seed(zlib.crc32(uncompiled(name).encode()))
            size = STIRRED / (layer.scaling[adapter] * layer.r[adapter] ** 0.5)
            linear.weight.data.copy_(size * torch.randn(linear.weight.shape, generator=drawn))


def _labels(batch: Batch) -> int:
    return int((batch["labels"] != IGNORED).sum())


def uncompiled(name: str) -> str:
    """The name that a module or a weight has in the model without being compiled."""
    return name.replace("_orig_mod.", "")


def trained_tensors(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Name -> weight, by the names that the model has without being compiled."""
    return {uncompiled(name): weight for name, weight in model.named_parameters() if weight.requires_grad}


class Watch:
    """A few thousand weights of each trained tensor: where they began, and where they were last."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = trained_tensors(model)
        self._first = {name: self._some(weight) for name, weight in self._tensors.items()}
        self._last = dict(self._first)

    @staticmethod
    def _some(weight: torch.Tensor) -> torch.Tensor:
        return _spread(weight.detach(), WATCHED).to("cpu", torch.float32, copy=True)

    def has_moved(self) -> bool:
        """Whether any weight has changed since the last call."""
        now = {name: self._some(weight) for name, weight in self._tensors.items()}
        moved = any(not torch.equal(now[name], self._last[name]) for name in now)
        self._last = now
        return moved

    def moved(self) -> dict[str, float]:
        """The root mean square of how far each tensor is from its first values, but for what weight decay did to it."""
        return {name: _beside(self._last[name] - first, first) for name, first in self._first.items()}

    def shrunk(self) -> float | None:
        """The share by which the matrices became smaller along their first values, None if all of them began at 0."""
        along = squares = 0.0
        for name, first in self._first.items():
            if self._tensors[name].ndim >= 2:
                along -= float(((self._last[name] - first) * first).sum())
                squares += float(first.square().sum())
        return along / squares if squares else None


def _spread(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """About so many of a tensor's values, spread over it."""
    flat = tensor.flatten()
    return flat[:: max(1, flat.numel() // count)]


def _beside(way: torch.Tensor, first: torch.Tensor) -> float:
    """The root mean square of the change `way` without its part along `first`, the direction of weight decay."""
    square = float(first.square().sum())
    along = float((way * first).sum()) / square if square else 0.0
    return float((way - along * first).square().mean().sqrt())


@dataclass
class Arrived:
    """The norms of the gradients with which the optimizer is called, and some values of step 0's.

    Both stay empty for an optimizer without hooks, and for one that steps in the backward pass, which has dropped the
    gradients by then.
    """

    bundle: Bundle
    norms: list[float | None] = field(default_factory=list)
    gradients: dict[str, tuple[float, ...]] = field(default_factory=dict)
    # Whether step 0 is over: later calls belong to later steps, even if a gradient scaler skipped step 0.
    first_is_over: bool = False
    _hook: Any = None

    def __post_init__(self) -> None:
        if not self.bundle.recipe.steps_in_backward:
            self._hook = self.bundle.optimizer.register_step_pre_hook(self._read)

    def _read(self, *_: Any) -> None:
        gradients = [one.grad for group in self.bundle.optimizer.param_groups for one in group["params"]]
        norm = float(torch.nn.utils.get_total_norm([one for one in gradients if one is not None]))
        self.norms.append(norm if math.isfinite(norm) else None)
        if not self.first_is_over:
            self.gradients = {
                name: tuple(_spread(weight.grad, COMPARED).to("cpu", torch.float32).tolist())
                for name, weight in trained_tensors(self.bundle.model).items()
                if weight.grad is not None and weight.ndim >= 2
            }

    def end(self) -> None:
        """Take the hook off."""
        if self._hook is not None:
            self._hook.remove()
