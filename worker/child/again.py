"""Blocks and replays one after another on the same loaded model.

In a verification its adapter is drawn anew for each of them; a trial's model is trained on as it is.

Loading the model takes longer than a block of it where the model is large. An adapter leaves the weights that it was
put on as they were, so the next block needs nothing but first weights of the adapter under its own seed, and an
optimizer that has seen nothing (docs/decisions/0028).
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch

from service.contract.child import ChildMessage, Order, Result, RunAgain, RunBlock, RunReplay, Turn
from training.errors import TrainingError
from training.step import gradient_scaler
from worker.child import steps
from worker.child.block import run_block
from worker.child.build import Bundle, build
from worker.child.replay import run_replay, trained_tensors, uncompiled
from worker.devices import Device

NAME, SPARE = "default", "again"  # of the adapter that is trained, and of the one that new weights are drawn for
Marks = dict[str, tuple[int, int]]


def serve(
    request: RunBlock | RunReplay, device: Device, tell: Callable[[ChildMessage], None], hear: Callable[[], Order]
) -> Result:
    """Carry out the request and those that are ordered after it; the result of the last. Errors pass through."""
    asked = (request.spec, request.candidate.configuration, device, request.workplace, request.seed)
    bundle = build(*asked, tell, holds_rows=isinstance(request, RunBlock))  # nobody runs a replay's reference
    if bundle.compiled:
        bundle.compile()
    first, marks = request, frozen(bundle.model)
    while True:
        if isinstance(request, RunBlock):
            block = run_block(request, bundle, tell, lambda: _turn(hear))
            if isinstance(first, RunBlock) and first.block != request.block:
                block = block.model_copy(update={"process": first.block})
            result = Result(block=block)
        else:
            result = Result(replay=run_replay(request, bundle))
        if not request.stays or not can_reset(bundle) or frozen(bundle.model) != marks:
            return result
        tell(result.model_copy(update={"stays": True}))
        order = hear()
        assert not isinstance(order, Turn), "a child between two requests takes no turns"
        request = order.request
        reset(bundle, request)


def stay(result: Result, bundle: Bundle, tell: Callable[[ChildMessage], None], hear: Callable[[], Order]) -> NoReturn:
    """Tell a trial's result, then take turns with other children as often as that is ordered, until the worker ends it.

    Only seconds are asked for, so that the model is trained on as it is.
    """
    while True:
        tell(result.model_copy(update={"stays": True}))
        order = hear()
        assert isinstance(order, RunAgain) and isinstance(order.request, RunBlock), "a trial's child takes turns only"
        result = Result(block=run_block(order.request, bundle, tell, lambda: _turn(hear)))


def _turn(hear: Callable[[], Order]) -> Turn:
    """The next turn of a block."""
    order = hear()
    assert isinstance(order, Turn), "a child in the middle of a block takes turns only"
    return order


def can_reset(bundle: Bundle) -> bool:
    """Whether an adapter's matrices are all that the bundle trains and all that its seed has drawn.

    A new head is drawn together with the weights that are loaded, and full finetuning changes those: nothing less than
    loading brings them back.
    """
    recipe = bundle.recipe
    if recipe.lora is None or recipe.random_weights or recipe.heads:
        return False
    return all(f".{NAME}" in name for name in trained_tensors(bundle.model))


def frozen(model: torch.nn.Module) -> Marks:
    """Identity and torch's version counter of each frozen weight and buffer: while they stay, nothing wrote to them."""
    every = (*model.named_parameters(), *model.named_buffers())
    return {name: (id(one), one._version) for name, one in every if not one.requires_grad}


def reset(bundle: Bundle, request: RunBlock | RunReplay) -> None:
    """Put a bundle into the state that a fresh build for this request would have. What was compiled is kept."""
    bundle.configuration = request.candidate.configuration
    rate = bundle.configuration.learning_rate
    bundle.recipe = replace(bundle.recipe, seed=request.seed, learning_rate=rate)
    for weight in trained_tensors(bundle.model).values():
        weight.grad = None
    draw_adapter(bundle.model, bundle.recipe.seed, bundle.recipe.autocast_adapter)
    steps.replace_optimizer(bundle)
    bundle.scaler, bundle.skipped = gradient_scaler(bundle.device.torch, bundle.recipe), 0
    gc.collect()
    bundle.device.synchronize()
    bundle.device.empty_cache()
    bundle.device.reset_peak()


def draw_adapter(model: Any, seed: int, autocast: bool) -> None:
    """Give the adapter the weights that `training.model.with_adapter` would have drawn for it under this seed.

    peft draws them itself, for a second adapter of the same form on the same layers, so that its rules hold (formats,
    DoRA's magnitudes, the order of the draws). They are copied into the first one in place: hooks, fused functions,
    compiled code and CUDA graphs know its tensors.
    """
    trained = trained_tensors(model)
    torch.manual_seed(seed)
    model.add_adapter(SPARE, copy.deepcopy(model.peft_config[NAME]), autocast_adapter_dtype=autocast)
    drawn = {
        uncompiled(name).replace(f".{SPARE}", f".{NAME}"): weight
        for name, weight in model.named_parameters()
        if f".{SPARE}" in name
    }
    if drawn.keys() != trained.keys():
        raise TrainingError("peft put a second adapter of the same form on other layers", "configuration")
    with torch.no_grad():
        for name, weight in trained.items():
            weight.copy_(drawn[name])
    model.delete_adapter(SPARE)
    if trained_tensors(model).keys() != trained.keys():
        raise TrainingError("peft left other weights trainable than before", "configuration")
