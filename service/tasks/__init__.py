"""The tasks of the catalogue, as data: one file a task, found by being in this folder."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from service.folders import declared
from service.tasks.base import Task


def discover() -> dict[str, Task]:
    """Every task that a file of this folder declares as TASK, by name."""
    return declared(__name__, __path__, "TASK", attrgetter("name"), helpers=("base",))


TASKS: dict[str, Task] = discover()


def untrainable(config: Mapping[str, Any]) -> str | None:
    """A sentence when a model's config.json is of a kind that no task trains, else None."""
    if not config.get("is_encoder_decoder"):
        return None
    return (
        f"model.source: {config.get('model_type', 'such')} models have an encoder and a decoder, which no task trains; "
        "supported are decoders, such as Llama and Qwen, and encoders, such as BERT"
    )


__all__ = ["TASKS", "Task", "discover", "untrainable"]
