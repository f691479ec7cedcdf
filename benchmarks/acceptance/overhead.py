"""Part `overhead`: our training loop against transformers' Trainer, same model, batches, precision and optimizer.

Both train the model that the worker builds, on the same micro batches in the same order, collated by the same code;
Trainer has the arguments that dynotune exports. Wall-clock between two waits for the device, fresh processes in turns.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.acceptance.models import data, model
from benchmarks.acceptance.place import ROOT, Part, Place, Step
from benchmarks.store import Row
from service.contract.child import Workplace
from service.contract.configuration import Configuration
from service.contract.job import JobSpec
from service.levers import LEVERS

WARM, BLOCKS = 5, 2
# name -> model, data, task, method, length, micro batch, effective batch, steps
# An 8B model is left out: its kernels take so long that no loop around them shows.
SIZES: dict[str, tuple[str, str, str, str, int, int, int, int]] = {
    "bert-base": ("bert-base", "short", "sequence-classification", "full", 128, 32, 32, 100),
    "llama-1b": ("llama-1b", "varying", "causal-lm", "lora", 2048, 4, 16, 20),
}


def request(place: Place, name: str) -> dict[str, Any]:
    """What both children are given."""
    source, rows, task, method, length, micro, effective, steps = SIZES[name]
    if place.dry:
        length, micro, effective, steps = 64, 2, 4, 3
    levers = {lever.name: lever.baseline for lever in LEVERS.values()}
    levers |= {"precision": "bf16-mixed", "optimizer": "adamw-fused"}
    spec = {
        "name": name,
        "model": {"source": str(model(place, source)), "weights": "pretrained" if "llama" in source else "random"},
        "dataset": {"source": str(data(place, rows)), "max_length": length},
        "task": task,
        "method": method,
        "training": {"effective_batch_size": effective, "learning_rate": 1e-4},
        "hardware": {"device": place.device},
    }
    configuration = Configuration.model_validate(
        {
            "method": method,
            "levers": levers,
            "effective_batch_size": effective,
            "learning_rate": 1e-4,
            "micro_batch_size": micro,
        }
    )
    checked = JobSpec.model_validate(spec).model_dump(mode="json")
    return {
        "spec": checked,
        "configuration": configuration.model_dump(mode="json"),
        "steps": steps,
        "home": str(place.home),
        "device": place.device,
    }


def child(way: str, asked: dict[str, Any]) -> Row:
    """Non-padding tokens/s of one way."""
    from worker.child.arrange import plan_of
    from worker.child.build import build
    from worker.devices import open_device

    spec, configuration = (
        JobSpec.model_validate(asked["spec"]),
        Configuration.model_validate(asked["configuration"]),
    )
    device, home = open_device(asked["device"]), Path(asked["home"])
    device.limit(None)
    workplace = Workplace(
        device=asked["device"],
        data_roots=(home, ROOT),
        hub_cache=home / "hub",
        job_cache=home / "cache" / f"overhead-{spec.name}",
    )
    bundle = build(spec, configuration, device, workplace, 0)
    count = (WARM + asked["steps"]) * configuration.effective_batch_size
    samples = [at % len(bundle.data.lengths) for at in range(count)]
    plan = plan_of(bundle, samples, configuration.micro_batch_size or 1)
    seconds = {"ours": _ours, "trainer": _trainer}[way](bundle, plan)
    timed = [sample for step in plan[WARM:] for micro in step for row in micro for sample in row]
    return {"tokens_per_second": sum(bundle.data.lengths[sample] for sample in timed) / seconds}


def _ours(bundle: Any, plan: list[Any]) -> float:
    """Seconds of the steps after the warm ones, with the schedule and the look at each loss that train.py has."""
    import contextlib

    from transformers import get_scheduler

    from worker.child import steps

    started, schedule = 0.0, get_scheduler("linear", bundle.optimizer, 0, len(plan))
    with contextlib.closing(steps.prepared(bundle, plan)) as prepared:
        for number, (batches, items, _) in enumerate(prepared):
            if number == WARM:
                bundle.device.synchronize()
                started = time.perf_counter()
            results = steps.optimizer_step(bundle, batches, items)
            list(map(float, results))
            schedule.step()
    bundle.device.synchronize()
    return time.perf_counter() - started


def _trainer(bundle: Any, plan: list[Any]) -> float:
    """The same by Trainer, with the exported arguments."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from service.contract.recommendation import RecommendedConfiguration
    from service.exports.arguments import arguments
    from training.batches import collate

    made = bundle.configuration
    exported = RecommendedConfiguration(
        method=made.method,
        levers=made.levers,
        micro_batch_size=made.micro_batch_size,
        gradient_accumulation_steps=made.effective_batch_size // made.micro_batch_size,
        effective_batch_size=made.effective_batch_size,
        evaluation_batch_size=1,
        learning_rate=made.learning_rate,
        rows_are_packed=False,
    )
    written = arguments(bundle.spec, exported, not bundle.device.has_own_memory)["TrainingArguments"]
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}
    rows = [[bundle.data.train[at] for at in row] for step in plan for micro in step for row in micro]
    clock: dict[str, float] = {}

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step in (WARM, len(plan)):
                bundle.device.synchronize()
                clock["started" if state.global_step == WARM else "ended"] = time.perf_counter()

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return SequentialSampler(rows)

    with tempfile.TemporaryDirectory() as scratch:
        options = written | quiet | {"output_dir": scratch, "num_train_epochs": 1}
        trainer = InOrder(
            model=bundle.model,
            args=TrainingArguments(**options),
            train_dataset=rows,
            data_collator=lambda part: collate(part, bundle.pad, bundle.recipe),
            callbacks=[Clock()],
        )
        trainer.train()
    assert trainer.state.global_step == len(plan), "both take the same steps"
    return clock["ended"] - clock["started"]


def compared(place: Place, name: str) -> Row:
    """Tokens/s of both in every block, and the median ratio."""
    asked = request(place, name)
    seen: dict[str, list[float]] = {"ours": [], "trainer": []}
    for number in range(place.pick(BLOCKS, 1)):
        for way in ("ours", "trainer") if number % 2 == 0 else ("trainer", "ours"):
            seen[way].append(place.child("overhead", way, asked)["tokens_per_second"])
    ratios = [ours / theirs for ours, theirs in zip(seen["ours"], seen["trainer"], strict=True)]
    return seen | {"ratio": statistics.median(ratios)}


def steps(place: Place) -> list[Step]:
    """One a model."""

    def step(name: str, seconds: float) -> Step:
        return Step(f"overhead/{name}", seconds, lambda here: compared(here, name))

    real = [step("bert-base", 50), step("llama-1b", 120)]
    return real[: place.pick(2, 1)]


def show(_: Place, rows: dict[str, Row]) -> list[str]:
    """A line a model."""
    lines = []
    for key, row in rows.items():
        if "reason" not in row:
            ours, theirs = statistics.median(row["ours"]), statistics.median(row["trainer"])
            said = "" if row["ratio"] >= 1 else "  NOT REACHED"
            lines.append(
                f"{key.rpartition('/')[2]:10} ours {ours:,.0f} tokens/s, Trainer {theirs:,.0f}: {row['ratio']:.2f}x "
                f"(at least 1 wanted){said}"
            )
    return lines


PART = Part("overhead", steps, show)
