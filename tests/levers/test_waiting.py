"""The host launches a micro batch without waiting for the GPU: nothing reads there what the host knows already.

A wait costs little by itself, but the GPU has nothing queued after it. A CPU has no queue; seen here are the
operations that would wait, of which the result or its size is read on the host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils, modeling_flash_attention_utils

from tests.child import tiny
from training.batches import target_positions
from training.levers.head import defer_logits
from training.packing import know_packed_rows, know_single_rows
from worker.child import steps
from worker.child.arrange import plan_of

WAIT = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "_unique2"}


class Waits(TorchDispatchMode):  # type: ignore[misc]
    """Records the operations that would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        places = args[1] if name in {"index", "index_put", "index_put_"} else ()
        if name in WAIT or any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in places):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def waits_of(job: Any, method: str, **levers: Any) -> list[str]:
    """The waits in a step of two micro batches."""
    bundle = tiny.bundle(job, method, **levers)
    (step,) = plan_of(bundle, list(range(8)), 4, 8)
    batches, terms, _ = steps.prepare(bundle, step)
    count = torch.tensor(terms)
    with Waits() as waits:
        for batch in batches:
            steps.forward_backward(bundle, batch, count)
    return list[str](waits.seen)


@pytest.mark.parametrize(
    "levers",
    [
        {"batching": "sorted"},
        {"batching": "packed"},
        {"batching": "sorted", "head": "chunked"},
        {"batching": "packed", "head": "chunked", "attention": "eager"},
        {"batching": "sorted", "precision": "bf16-mixed", "checkpointing": "full"},
        {"batching": "packed", "projections": "fused"},
    ],
    ids=lambda levers: "-".join(levers.values()),
)
def test_a_micro_batch_never_waits(llama: Path, functions: Path, levers: dict[str, Any]) -> None:
    assert waits_of(tiny.job(llama, functions), "lora", **levers) == []


def test_the_baseline_waits_as_it_does_for_a_user_of_trainer(llama: Path, functions: Path) -> None:
    """transformers looks into the mask of padded rows. That a wait is seen shows that the test above can fail."""
    assert waits_of(tiny.job(llama, functions), "lora")


def test_whether_rows_are_packed_is_told() -> None:
    plain, packed = torch.arange(6).expand(2, 6), torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]])
    know_packed_rows()
    assert masking_utils.find_packed_sequence_indices(packed).tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]]
    know_single_rows()
    assert masking_utils.find_packed_sequence_indices(plain) is None
    assert not modeling_flash_attention_utils._is_packed_sequence(plain[:1], 1), "it would be asked in every layer"


def test_a_trainer_with_its_own_batches_gets_the_same_loss(llama: Path) -> None:
    """It tells no positions, and its labels may begin with one that counts, which nothing predicts."""
    from transformers import AutoModelForCausalLM

    model, seen = AutoModelForCausalLM.from_pretrained(llama), []

    def loss(hidden: torch.Tensor, labels: torch.Tensor, head: Any) -> torch.Tensor:
        seen.append(labels.tolist())
        return torch.nn.functional.cross_entropy(hidden @ head.weight.T, labels, reduction="sum")

    ids = torch.tensor([[1, 7, 8, 9], [1, 5, 6, 0]])
    labels = torch.tensor([[1, -100, 8, 9], [-100, 5, 6, -100]])
    wanted = model(input_ids=ids, labels=labels).loss
    defer_logits(model.train(), loss)
    told = target_positions(torch.tensor([[-100, -100, 8, 9], [-100, 5, 6, -100]]))
    assert (model(input_ids=ids, labels=labels).loss.item()) == pytest.approx(wanted.item())
    assert (model(input_ids=ids, labels=labels, target_positions=told).loss.item()) == pytest.approx(wanted.item())
    assert seen == [[8, 9, 5, 6]] * 2
