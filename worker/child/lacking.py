"""Which levers' choices a model cannot have: its first trial reports them, so that no later trial is wasted on one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from service.levers import LEVERS
from service.levers.head import WITHOUT_LOGITS
from service.tasks import untrainable
from training.errors import TrainingError
from training.levers.head import lacking_plain_logits
from training.levers.kernels import lacking_in_liger
from training.levers.normalisation import lacking_layer_norms
from training.recipe import Recipe, task_of


class Lacking(TrainingError):
    """The configuration has a choice that the model cannot have; `lacks` are all such choices, as of `lacking`."""

    def __init__(self, sentence: str, lacks: dict[str, str]) -> None:
        super().__init__(sentence, "configuration")
        self.lacks = lacks


def class_of(config: Any, recipe: Recipe) -> type | None:
    """The class that transformers has for the model and the task; None where the model may bring code of its own.

    TrainingError where there is none, or the model is of a kind that no task trains.
    """
    from transformers.models.auto.auto_factory import _get_model_class

    if sentence := untrainable(config.to_dict()):
        raise TrainingError(sentence)
    if hasattr(config, "auto_map"):
        return None
    auto = task_of(recipe).model_class()
    try:
        found: type = _get_model_class(config, auto._model_mapping)
    except KeyError as error:
        sentence = f"model.source: transformers has no {auto.__name__} for {config.model_type} models"
        raise TrainingError(f"{sentence}, so they cannot be trained for {recipe.task}") from error
    return found


def attention_dropout(config: Any) -> float:
    """The rate at which the model drops attention weights."""
    names = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
    return max((getattr(config.get_text_config(), name, 0.0) or 0.0 for name in names), default=0.0)


def lacking_attention(config: Any, kind: type | None) -> dict[str, str]:
    """`attention=choice` -> why a model of this configuration and class (None: not known) cannot have it."""
    found, rate = {}, attention_dropout(config)
    if size := getattr(config.get_text_config(), "attention_chunk_size", None):
        found["attention=varlen"] = f"it does not know of this model's attention within chunks of {size} tokens"
    for choice in LEVERS["attention"].choices:
        if kind is not None and not all(getattr(kind, name, False) for name in choice.supported_by):
            found[f"attention={choice.name}"] = f"transformers' {kind.__name__} does not support it"
        elif rate and not choice.drops_attention:
            reason = f"it has no dropout, and the model's config.json asks for {rate}"
            found[f"attention={choice.name}"] = reason
    return found


def check_attention(choice: str, config: Any, kind: type | None) -> None:
    """Lacking where the model cannot have the attention kernel."""
    found = lacking_attention(config, kind)
    if reason := found.get(f"attention={choice}"):
        raise Lacking(f"attention={choice} cannot be with this model: {reason}", found)


def lacking_kernels(kind: str) -> dict[str, str]:
    """`kernels=choice` -> why Liger has no such kernels for models of a kind. Importing Liger takes a second or two.

    Nothing where it does not import: the worker's facts say so, and no trial has these choices.
    """
    found: dict[str, str] = {}
    try:
        import_module("liger_kernel.transformers.monkey_patch")
    except Exception:  # noqa: BLE001 - a package may fail to import in any way
        return found
    for choice in LEVERS["kernels"].choices:
        if choice.function != "liger_kernels":
            continue
        if reason := lacking_in_liger(kind, choice.options["operations"]):
            found[f"kernels={choice.name}"] = reason
    return found


def lacking(model: Any, task: str) -> dict[str, str]:
    """`lever=choice` -> why this model cannot have it, whatever it is trained with; of levers that the task has."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = lacking_attention(base.config, type(base))
    if not base._can_set_experts_implementation():
        reason = f"{base.config.model_type} models have no experts"
        others = [choice for choice in LEVERS["experts"].names if choice != LEVERS["experts"].baseline]
        found |= {f"experts={choice}": reason for choice in others}
    tasks = LEVERS["head"].tasks
    if (tasks is None or task in tasks) and (changed := lacking_plain_logits(base)):
        found |= {f"head={choice}": changed for choice in WITHOUT_LOGITS}
    if without := lacking_layer_norms(base):
        found["normalisation=apex-fused"] = without
    head = base.get_output_embeddings()
    return found | (lacking_in_vocabulary(head.weight.shape[0]) if hasattr(head, "weight") else {})


def lacking_in_vocabulary(size: int) -> dict[str, str]:
    """`vocabulary=choice` -> why a vocabulary of that size does not grow by it."""
    multiples = {one.name: one.options["multiple"] for one in LEVERS["vocabulary"].choices if one.function}
    return {
        f"vocabulary={name}": f"the model's {size:,} tokens are a multiple of {multiple} already"
        for name, multiple in multiples.items()
        if size % multiple == 0
    }
