"""Which levers' choices a model cannot have: its first trial reports them, so that no later trial is wasted on one."""

from __future__ import annotations

from typing import Any

from service.levers import LEVERS
from training.errors import TrainingError

WITHOUT_DROPOUT = tuple(choice.name for choice in LEVERS["attention"].choices if not choice.drops_attention)


def attention_dropout(config: Any) -> float:
    """The rate at which the model drops attention weights."""
    names = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
    return max((getattr(config.get_text_config(), name, 0.0) or 0.0 for name in names), default=0.0)


def check_attention(choice: str, config: Any) -> None:
    """TrainingError where the model's configuration has attention dropout, which the chosen kernel cannot compute."""
    rate = attention_dropout(config)
    if rate and choice in WITHOUT_DROPOUT:
        sentence = f"attention={choice} has no dropout, and the model's config.json asks for {rate}"
        raise TrainingError(sentence, "configuration")


def lacking(model: Any) -> dict[str, str]:
    """`lever=choice` -> why this model cannot have it."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    found: dict[str, str] = {}
    if rate := attention_dropout(base.config):
        reason = f"it has no dropout, and the model's config.json asks for {rate}"
        found |= {f"attention={choice}": reason for choice in WITHOUT_DROPOUT}
    if not base._can_set_experts_implementation():
        reason = f"{base.config.model_type} models have no experts"
        others = [choice for choice in LEVERS["experts"].names if choice != LEVERS["experts"].baseline]
        found |= {f"experts={choice}": reason for choice in others}
    return found
