"""Configuration: one point of the search space, with its batch sizes and its learning rate."""

from __future__ import annotations

import hashlib
import json

from pydantic import Field

from service.contract.base import Contract
from service.contract.job import Method


class Configuration(Contract):
    """A method with a choice for every lever, the effective batch, and perhaps a fixed micro batch.

    `effective_batch_size` counts samples an optimizer step; `micro_batch_size` counts the samples (or the rows, where
    they are packed) of one forward and backward pass. Where it is None, the trial looks for the fastest.
    """

    method: Method
    levers: dict[str, str] = Field(
        description="The choice of every lever. One that the method or the task has no use for, as `quantization` with "
        "lora, is at its baseline and does nothing."
    )
    effective_batch_size: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    micro_batch_size: int | None = Field(default=None, ge=1)

    @property
    def key(self) -> str:
        """Twelve hex digits of a hash, which identify the configuration."""
        text = json.dumps(self.model_dump(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def at_micro_batch(self, size: int | None) -> Configuration:
        """The same at another micro batch; with None it looks for the fastest."""
        return self.model_copy(update={"micro_batch_size": size})

    def title(self, against: Configuration | None = None) -> str:
        """One line for people: the levers that differ from `against`, or all of them."""
        parts = [
            f"{name}={choice}"
            for name, choice in self.levers.items()
            if against is None or against.levers.get(name) != choice
        ]
        if against is not None and against.effective_batch_size != self.effective_batch_size:
            parts.append(f"effective batch {self.effective_batch_size}")
        return " ".join(parts) or "as the baseline"
