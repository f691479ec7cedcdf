"""What all parts of the exported train.py share. The parts are joined by service/exports/train_py.py."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

CONFIG: dict[str, Any] = {}

IGNORED = -100  # the label that cross-entropy leaves out
MOST_SKIPPED = 20  # updates in a row that fp16 may skip while its loss scale comes down from 65,536

# Token ids; labels (a label for each token, or one class number). Of int64: a list takes up to 36 bytes a token.
Sample = tuple["array[int]", "array[int]"]
Row = list[int]  # samples by number: one, or several when packed
MicroBatch = list[Row]  # what one forward and backward takes
Step = list[MicroBatch]  # what one optimizer step takes
Batch = dict[str, Any]


def sample_of(ids: Sequence[int], labels: Sequence[int]) -> Sample:
    """A sample as it is kept."""
    return array("q", ids), array("q", labels)


def lever(name: str) -> str:
    """The choice that was measured."""
    return str(CONFIG["levers"][name])


def autocast_dtype() -> torch.dtype | None:
    """The format of matmuls under autocast, or None without autocast."""
    kind = CONFIG["precision"].get("autocast")
    return getattr(torch, kind) if kind else None


def padded_width(longest: int, multiple: int, most: int) -> int:
    """The tokens that rows are padded to: the next multiple, or `most` where it is 0; never less than the longest."""
    return max(longest, min(most, -(-longest // multiple) * multiple) if multiple else most)


def parameter_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters: matrices with decay, vectors (biases, norms) without; no empty group.

    `embeddings` says which of a group's parameters are embeddings' weights.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [one for one in trained if one.ndim >= 2], "weight_decay": weight_decay},
        {"params": [one for one in trained if one.ndim < 2], "weight_decay": 0.0},
    ]
    embeddings = {id(one.weight) for one in model.modules() if isinstance(one, torch.nn.Embedding)}
    for group in groups:
        group["embeddings"] = [at for at, one in enumerate(group["params"]) if id(one) in embeddings]
    return [group for group in groups if group["params"]]


def gradient_norm(model: Any, optimizer: Any, most: float) -> torch.Tensor:
    """Clip the gradients to `most` (0: as they are); their norm before. In-backward optimizers know it themselves."""
    if hasattr(optimizer, "norm"):
        found: torch.Tensor = optimizer.norm()
        return found
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if most:
        return torch.nn.utils.clip_grad_norm_(trained, most).detach()
    return torch.nn.utils.get_total_norm([one.grad for one in trained if one.grad is not None]).detach()


def is_classifier() -> bool:
    """Whether the task is sequence classification."""
    return bool(CONFIG["task"] == "sequence-classification")


def is_masked() -> bool:
    """Whether the task is masked language modelling; if neither, it is causal language modelling."""
    return bool(CONFIG["task"] == "masked-lm")
