"""What a model does that its configuration counts on, seen by running it on a few tokens before anything is measured.

Models of some hundred kinds come with code of their own, and no list says which of them keep the samples of a packed
row apart, or do more to their logits than their output layer does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from service.levers.batching import PACKED
from service.levers.head import WITHOUT_LOGITS
from training.batches import collate, moved
from training.errors import TrainingError
from training.levers.attention import NotTold
from training.levers.checkpointing import checkpoint_selectively, checkpointed
from training.recipe import Recipe, task_of
from training.samples import IGNORED, Sample, sample_of
from training.step import autocast
from worker.child.lacking import Lacking
from worker.child.overwritten import Overwritten
from worker.devices import Device

TOKENS = 8  # of each of the samples, at most
WIDTH = 64  # tokens that a row is padded to where it would be padded to the longest that the job allows
# Share of their standard deviation by which logits may move where nothing has changed for them, and how many times as
# much as they move when the same row is run again: kernels that add in no fixed order are never quite the same.
UNMOVED, AGAIN = 1e-4, 10.0


def check_behaviour(model: Any, samples: Sequence[Sample], pad: int, device: Device, recipe: Recipe) -> None:
    """TrainingError where the model does not do what the configuration needs, Lacking where that rules choices out.

    Nothing is run with flex attention, which would be compiled for these few tokens. With activations in 8 bits, other
    tokens decide how one is rounded, so that only the loss is looked at. Other trials check the rest on this model.
    """
    if recipe.attention == "flex_attention":
        return
    was_training = model.training
    model.eval()
    try:
        if any(one.function == checkpoint_selectively.__name__ for one in (*recipe.on_base, *recipe.on_model)):
            _check_kept(model, samples[0], pad, device, recipe)
        if recipe.labels_are_classes:
            _check_pooling(model.config)
            return
        if recipe.task == "causal-lm":
            _check_loss(model, max(samples[0], samples[-1], key=lambda one: len(one[0])), pad, device, recipe)
        if not _rounds_together(recipe):
            _check_tokens(model, samples, pad, device, recipe)
    except NotTold as error:
        reason = f"{model.config.model_type} models do not tell attention where samples end"
        raise Lacking(reason, {"attention=varlen": reason}) from error
    finally:
        model.train(was_training)


def _check_tokens(model: Any, samples: Sequence[Sample], pad: int, device: Device, recipe: Recipe) -> None:
    """Check which tokens see which others, and whether the output layer makes the logits, where that is counted on."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    may_see_targets = recipe.task == "causal-lm" and getattr(base.config, "is_decoder", None) is False
    if not (recipe.packed or recipe.tells_what_is_learnt or may_see_targets):
        return
    rows = base.get_input_embeddings().weight.shape[0]
    first, second = (list(ids[:TOKENS]) for ids, _ in (samples[0], samples[-1]))

    def logits(*row: list[int]) -> torch.Tensor:
        return _logits(model, [sample_of(ids, ids) for ids in row], pad, device, recipe)

    def changed(ids: list[int]) -> list[int]:
        return [(one + 1) % rows for one in ids]

    if may_see_targets:
        other = [*second[:-1], *changed(second[-1:])]
        if _moves([logits(ids)[:-1] for ids in (second, second, other)]):
            kind = base.config.model_type
            raise TrainingError(f"model.source: this {kind} model sees the tokens that causal-lm has it predict")
    if recipe.packed and _moves([logits(ids, second)[len(first) :] for ids in (first, first, changed(first))]):
        _refuse_packing(base, recipe)
    if recipe.tells_what_is_learnt:
        _check_head(base, lambda: logits(second))


def _check_pooling(config: Any) -> None:
    """TrainingError for a classifier that reads a row's last token, as rows are padded on the right."""
    if getattr(config, "summary_type", None) == "last":
        raise TrainingError(
            f"model.source: this {config.model_type} model classifies a text by its last token, and texts are padded "
            "on the right, so that it would be padding"
        )


@torch.no_grad()  # type: ignore[untyped-decorator]
def _check_kept(model: Any, sample: Sample, pad: int, device: Device, recipe: Recipe) -> None:
    """Lacking where a layer writes over what selective checkpointing keeps: its gradients may be wrong by that.

    A BigBird does, and its sparse attention would be dense for ever after a look at few tokens.
    """
    ids, overwritten = list(sample[0][:TOKENS]), Overwritten()
    if getattr(model.config, "attention_type", None) == "block_sparse":
        overwritten.by = "in its sparse attention"
    else:
        with overwritten.within(checkpointed(model)):
            _logits(model, [sample_of(ids, ids)], pad, device, recipe)
    if overwritten.by:
        reason = (
            f"layers of {model.config.model_type} models write over the result of a matmul ({overwritten.by}), which "
            "selective checkpointing would take for the result as it was"
        )
        raise Lacking(reason, {"checkpointing=selective": reason})


@torch.no_grad()  # type: ignore[untyped-decorator]
def _check_loss(model: Any, sample: Sample, pad: int, device: Device, recipe: Recipe) -> None:
    """TrainingError where the model does not divide its loss by the number of terms that it is given.

    A step's micro batches each give their share of the step's loss. Of such a model, each would count in full.
    """
    ids = list(sample[0][:TOKENS])
    batch = collate(
        [[sample_of(ids, [IGNORED, *ids[1:]])]], pad, replace(recipe, pad_multiple=recipe.pad_multiple or WIDTH)
    )
    inputs = moved(batch, device.torch, recipe)
    with autocast(device.torch, recipe):
        once, half = (
            float(task_of(recipe).summed_loss(model, inputs, torch.full((), count, device=device.torch)))
            for count in (1, 2)  # so that a router's own loss, which is not divided, hardly counts beside it
        )
    if abs(2 * half - once) > 0.05 * abs(once):
        kind = model.config.model_type
        raise TrainingError(
            f"model.source: this {kind} model does not divide its loss by the step's number of tokens (it ignores "
            "num_items_in_batch), so that a step's micro batches would count more than they should"
        )


def _rounds_together(recipe: Recipe) -> bool:
    """Whether activations are in 8 bits, with scales or outliers that all tokens have in common."""
    outliers = recipe.quantization is not None and "load_in_8bit" in recipe.quantization.options
    return outliers or any(one.lever == "float8" for one in (*recipe.on_base, *recipe.on_model))


@torch.no_grad()  # type: ignore[untyped-decorator]
def _logits(model: Any, row: list[Sample], pad: int, device: Device, recipe: Recipe) -> torch.Tensor:
    """The logits [tokens, vocabulary] of one row, without those of its padding."""
    batch = collate([row], pad, replace(recipe, pad_multiple=recipe.pad_multiple or WIDTH))
    for name in ("labels", "target_positions"):
        batch.pop(name, None)
    with autocast(device.torch, recipe):
        found: torch.Tensor = model(**moved(batch, device.torch, recipe)).logits[0]
    return found[: sum(len(ids) for ids, _ in row)].float()


def _moves(runs: list[torch.Tensor]) -> bool:
    """Whether the last run's logits differ from the first's by more than the second's, which repeats the first."""
    first, again, other = runs
    if not first.numel():
        return False
    same = float((again - first).abs().max())
    return float((other - first).abs().max()) > max(AGAIN * same, UNMOVED * float(first.std()))


def _refuse_packing(base: Any, recipe: Recipe) -> None:
    """Raise what tells that samples of one row see one another: through attention by a mask, or by other layers."""
    reason = f"the samples of one row see one another in models of kind {base.config.model_type}"
    if recipe.tells_where_samples_end:  # attention keeps them apart, so other layers do not
        raise Lacking(f"{reason}, so it cannot be packed", {f"batching={choice}": reason for choice in PACKED})
    raise TrainingError(f"{reason} with attention={recipe.attention}, so it cannot be packed", "configuration")


def _check_head(base: Any, run: Callable[[], torch.Tensor]) -> None:
    """Lacking where the model's logits are not what its output layer makes."""
    made: list[torch.Tensor] = []
    hook = base.get_output_embeddings().register_forward_hook(lambda _, __, output: made.append(output[0].float()))
    try:
        logits = run()
    finally:
        hook.remove()
    head = made[0][: len(logits)] if len(made) == 1 else None
    if head is None or head.shape != logits.shape or not torch.allclose(head, logits, rtol=1e-3, atol=1e-3):
        reason = "this model changes its logits after its output layer, so its loss cannot be computed without them"
        raise Lacking(reason, {f"head={choice}": reason for choice in WITHOUT_LOGITS})
