"""What a model does that its configuration counts on, seen by running it on a few tokens before anything is measured.

Models of some hundred kinds come with code of their own, and no list says which of them keep the samples of a packed
row apart, or do more to their logits than their output layer does.
"""

from __future__ import annotations

from typing import Any

import torch

from service.levers.batching import PACKED
from service.levers.head import WITHOUT_LOGITS
from training.batches import collate, moved
from training.errors import TrainingError
from training.recipe import Recipe
from training.samples import Sample, sample_of
from training.step import autocast
from worker.child.lacking import Lacking
from worker.devices import Device

TOKENS = 8  # of each of the samples, at most
# Share of their standard deviation by which logits may move where nothing has changed for them: numbers of few bits are
# rounded together. Where one sample sees another, they move by more (tests/levers/test_behaviour.py).
UNMOVED = 0.05


def check_behaviour(model: Any, samples: list[Sample], pad: int, device: Device, recipe: Recipe) -> None:
    """TrainingError where the model does not do what the configuration needs, Lacking where that rules choices out.

    Nothing is run where nothing is needed, nor with flex attention, which would be compiled for these few tokens.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    may_see_targets = recipe.task == "causal-lm" and getattr(base.config, "is_decoder", None) is False
    if recipe.labels_are_classes or recipe.attention == "flex_attention":
        return
    if not (recipe.packed or recipe.tells_what_is_learnt or may_see_targets):
        return
    rows = base.get_input_embeddings().weight.shape[0]
    first, second = (list(ids[:TOKENS]) for ids, _ in (samples[0], samples[-1]))

    def logits(*row: list[int]) -> torch.Tensor:
        return _logits(model, [sample_of(ids, ids) for ids in row], pad, device, recipe)

    def changed(ids: list[int]) -> list[int]:
        return [(one + 1) % rows for one in ids]

    was_training = model.training
    model.eval()
    try:
        if may_see_targets:
            before, after = logits(second), logits([*second[:-1], *changed(second[-1:])])
            if _moved(before[: len(second) - 1], after[: len(second) - 1]):
                kind = base.config.model_type
                raise TrainingError(f"model.source: this {kind} model sees the tokens that causal-lm has it predict")
        if recipe.packed:
            place = slice(len(first), len(first) + len(second))
            if _moved(logits(first, second)[place], logits(changed(first), second)[place]):
                _refuse_packing(base, recipe)
        if recipe.tells_what_is_learnt:
            _check_head(base, lambda: logits(second))
    finally:
        model.train(was_training)


@torch.no_grad()  # type: ignore[untyped-decorator]
def _logits(model: Any, row: list[Sample], pad: int, device: Device, recipe: Recipe) -> torch.Tensor:
    """The logits [tokens, vocabulary] of one row."""
    batch = moved(collate([row], pad, recipe), device.torch, recipe)
    with autocast(device.torch, recipe):
        found: torch.Tensor = model(**batch).logits[0].float()
    return found


def _moved(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether logits are others than before."""
    return bool((after - before).abs().max() > UNMOVED * before.std()) if before.numel() else False


def _refuse_packing(base: Any, recipe: Recipe) -> None:
    """Raise what tells that samples of one row see one another: through attention by a mask, or by other layers."""
    reason = f"the samples of one row see one another in a {base.config.model_type} model"
    if recipe.tells_where_samples_end:  # attention keeps them apart, so other layers do not
        raise Lacking(f"{reason}, so it cannot be packed", {f"batching={choice}": reason for choice in PACKED})
    raise TrainingError(f"{reason} with attention={recipe.attention}, so it cannot be packed", "configuration")


def _check_head(base: Any, run: Any) -> None:
    """Lacking where the model's logits are not what its output layer makes."""
    made: list[torch.Tensor] = []
    hook = base.get_output_embeddings().register_forward_hook(lambda _, __, output: made.append(output[0].float()))
    try:
        logits = run()
    finally:
        hook.remove()
    if len(made) != 1 or made[0].shape != logits.shape or _moved(made[0], logits):
        reason = "this model changes its logits after its output layer, so its loss cannot be computed without them"
        raise Lacking(reason, {f"head={choice}": reason for choice in WITHOUT_LOGITS})
