"""What a proof is for: faults of the kind that a kernel, an optimizer or a batching can have are found and named.

Each fault is planted into a real candidate on a tiny model, which is replayed beside the real reference.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from service.contract.job import JobSpec
from service.contract.measurement import Measurement
from service.contract.replay import Proof, Replay
from tests.child import tiny
from tests.factory import configuration, measured
from training import batches, optimization, step
from training.recipe import task_of
from training.samples import IGNORED
from worker.child import replay as replays
from worker.child.arrange import plan_of
from worker.plan import proof

Plant = Callable[[pytest.MonkeyPatch], None]
SEED = 7
NOISES: dict[str, proof.Noise] = {}  # by method, as a verification measures it once


def replayed(
    spec: JobSpec, candidate: Measurement, steps: tuple[tuple[int, ...], ...] = (), seed: int = SEED, rate: float = 1.0
) -> Replay:
    made = candidate.configuration
    bundle = tiny.built(spec, made.model_copy(update={"learning_rate": made.learning_rate * rate}), seed=seed)
    if steps:
        plan = [[[[one] for one in step]] for step in steps]
        return replays.replay(bundle, plan, [one for step in steps for one in step])
    size = proof.samples_a_step(candidate)
    given = replays.samples(bundle.data.lengths, proof.STEPS[spec.search.verify] * size, seed)
    return replays.replay(bundle, plan_of(bundle, given, candidate.micro_batch_size or 1, effective=size), given)


@pytest.fixture
def proved(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Proof]:
    """Proves a configuration, with a fault planted into the candidate's replay only."""
    data = tiny.write(tmp_path / "rows.jsonl", tiny.pairs(120, most=50))
    training = {"effective_batch_size": 8, "learning_rate": 1e-3, "weight_decay": 0.01, "max_grad_norm": 1.0}
    job = tiny.job(llama, data, training=training, search={"verify": "quick"})

    def prove(plant: Plant | None = None, method: str = "lora", **levers: str) -> Proof:
        plain = configuration(method, 8).model_copy(update={"learning_rate": 1e-3})
        made = plain.model_copy(update={"levers": plain.levers | {"precision": "fp32"} | levers})
        candidate = measured(made, micro_batch_size=2, check_grad_norm=1.0)
        spec, reference = proof.exposed(job, candidate), proof.references_of(candidate)[0][1]
        with monkeypatch.context() as patch:
            if plant:
                plant(patch)
            ours = replayed(spec, candidate)
        theirs = replayed(spec, reference, ours.steps)
        if method not in NOISES:
            half = ours.steps[:5]
            faster = replayed(spec, reference, half, rate=proof.RATE_CHANGE)
            NOISES[method] = proof.noise(theirs, faster, replayed(spec, reference, half, seed=SEED + 1))
        return proof.prove(spec, candidate, ours, theirs, NOISES[method])

    return prove


GOOD: list[tuple[str, dict[str, str]]] = [
    ("lora", {"batching": "grouped"}),
    ("lora", {"batching": "packed"}),
    ("lora", {"batching": "packed-global"}),
    ("lora", {"batching": "token-budget"}),
    ("lora", {"batching": "sorted", "checkpointing": "full"}),
    ("lora", {"head": "chunked"}),
    ("lora", {"optimizer": "adamw-foreach", "attention": "eager"}),
    ("lora", {"optimizer": "adamw-fused", "precision": "bf16-mixed"}),
    ("lora", {"optimizer": "adamw-bnb-32bit"}),
    ("full", {"batching": "grouped", "optimizer": "adamw-foreach"}),
    ("full", {"precision": "bf16-mixed", "batching": "packed"}),
    ("full", {"checkpointing": "full", "head": "chunked"}),
    ("qlora", {"batching": "grouped"}),
]


@pytest.mark.parametrize(("method", "levers"), GOOD)
def test_what_is_right_passes(proved: Callable[..., Proof], method: str, levers: dict[str, str]) -> None:
    found = proved(method=method, **levers)
    assert found.reasons == (), found
    assert found.steps >= 8 and found.samples == 40


def wrapped_optimizer(change: Callable[[Any], None]) -> Plant:
    """Changes the optimizer that a candidate is built with."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        made = optimization.make_optimizer

        def faulty(model: Any, recipe: Any) -> Any:
            optimizer = made(model, recipe)
            change(optimizer)
            return optimizer

        patch.setattr("worker.child.build.make_optimizer", faulty)

    return plant


def stepping(when: Callable[[int], bool]) -> Callable[[Any], None]:
    """Has an optimizer take only some of its steps."""

    def change(optimizer: Any) -> None:
        take, count = optimizer.step, iter(range(1000))

        def sometimes(*arguments: Any) -> None:
            if when(next(count)):
                take(*arguments)

        optimizer.step = sometimes

    return change


def half_rate(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] /= 2


def no_decay(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0


def no_clipping(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda given, _: norm_of([one.grad for one in given]))


def norm_of(gradients: list[torch.Tensor | None]) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([one for one in gradients if one is not None])


def half_of_the_labels(patch: pytest.MonkeyPatch) -> None:
    """As a head that cuts rows off: the loss of what is left is a mean over what is left."""
    real = task_of

    def cut(recipe: Any) -> Any:
        task = real(recipe)

        class Cut:
            @staticmethod
            def summed_loss(model: Any, batch: Any, count: torch.Tensor) -> torch.Tensor:
                labels = batch["labels"].clone()
                labels[:, labels.shape[1] // 2 :] = IGNORED
                return task.summed_loss(model, batch | {"labels": labels}, count)

        return Cut

    patch.setattr(step, "task_of", cut)


def one_adapter_alone(patch: pytest.MonkeyPatch) -> None:
    """As gradient checkpointing that loses the gradients of all layers but one."""
    real = step.forward_backward

    def lose(model: Any, *rest: Any) -> torch.Tensor:
        loss = real(model, *rest)
        trained = [one for one in model.parameters() if one.requires_grad]
        for one in trained[2:]:
            if one.grad is not None:
                one.grad.zero_()
        return loss

    patch.setattr(step, "forward_backward", lose)


def without_the_longest_tenth(patch: pytest.MonkeyPatch) -> None:
    real = batches.arranged

    def drop(order: Any, lengths: Any, *rest: Any) -> Any:
        kept = sorted(order, key=lambda one: lengths[one])[: -max(1, len(order) // 10)]
        return real([one for one in order if one in kept], lengths, *rest)

    patch.setattr("worker.child.arrange.arranged", drop)


def positions_go_on(patch: pytest.MonkeyPatch) -> None:
    """Packed samples see those before them in their row."""
    real = batches.collate

    def collate(*given: Any) -> Any:
        batch = real(*given)
        rows, width = batch["input_ids"].shape
        return batch | {"position_ids": torch.arange(width).expand(rows, width)}

    patch.setattr(batches, "collate", collate)


FAULTS: list[tuple[str, Plant, str, dict[str, str], str]] = [
    ("positions that are not restarted", positions_go_on, "lora", {"batching": "packed"}, "step 0's"),
    ("every second step skipped", wrapped_optimizer(stepping(lambda at: at % 2 == 0)), "lora", {}, "no trained weight"),
    ("one step and no more", wrapped_optimizer(stepping(lambda at: at == 0)), "lora", {}, "no trained weight changed"),
    ("half the rate", wrapped_optimizer(half_rate), "lora", {}, "at the learning rate"),
    ("half the rate", wrapped_optimizer(half_rate), "full", {}, "at the learning rate"),
    ("no decay", wrapped_optimizer(no_decay), "full", {"batching": "grouped"}, "weight decay"),
    ("no decay", wrapped_optimizer(no_decay), "lora", {}, "weight decay"),
    ("no clipping", no_clipping, "lora", {}, "clipped"),
    ("half of the labels", half_of_the_labels, "lora", {"batching": "grouped"}, "step 0's loss"),
    ("one adapter alone", one_adapter_alone, "lora", {"checkpointing": "full"}, "hardly move"),
    ("the longest left out", without_the_longest_tenth, "lora", {"batching": "grouped"}, "leaves out 4 of 40"),
]


@pytest.mark.parametrize(
    ("name", "plant", "method", "levers", "said"), FAULTS, ids=[f"{one[0]}-{one[2]}" for one in FAULTS]
)
def test_what_is_wrong_is_named(
    proved: Callable[..., Proof], name: str, plant: Plant, method: str, levers: dict[str, str], said: str
) -> None:
    found = proved(plant, method, **levers)
    assert any(said in reason for reason in found.reasons), (name, found)
