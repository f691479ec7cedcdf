"""The baseline: what a Trainer user gets without thinking, or the user's own TrainingArguments."""

from __future__ import annotations

from typing import Any

from service.contract.configuration import Configuration
from service.contract.job import JobSpec, Method
from service.contract.measurement import Measurement
from service.levers import LEVERS
from worker.plan.space import TRAINER_BATCH, learning_rate

# What TrainingArguments call optimizers; where several choices are written alike, it is the last one that Trainer has.
OPTIMIZERS = {
    choice.training_arguments["optim"]: choice.name
    for choice in LEVERS["optimizer"].choices
    if "optim" in choice.training_arguments
} | {"adamw_8bit": "adamw-8bit-stable-embedding", "adamw_torch": "adamw-foreach"}
READ = {
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
    "tf32",
    "optim",
    "gradient_checkpointing",
    "torch_compile",
    "group_by_length",
    "train_sampling_strategy",
    "attn_implementation",
}


def baseline(spec: JobSpec, method: Method) -> tuple[Configuration, tuple[str, ...]]:
    """(configuration, notes on what was left out of the user's arguments)."""
    mine: dict[str, Any] = spec.baseline if isinstance(spec.baseline, dict) else {}
    micro = int(mine.get("per_device_train_batch_size", TRAINER_BATCH))
    effective = spec.training.effective_batch_size or micro * int(mine.get("gradient_accumulation_steps", 1))
    levers = {name: lever.baseline for name, lever in LEVERS.items()}
    if mine:
        levers |= _levers(mine)
    notes = []
    for name, known in (("optim", OPTIMIZERS), ("attn_implementation", LEVERS["attention"].names)):
        if name in mine and mine[name] not in known:
            lever = "optimizer" if name == "optim" else "attention"
            notes.append(
                f"The baseline's {name}={mine[name]} is not in the catalogue, so {levers[lever]} was measured instead; "
                "the speed-up is over that."
            )
    if mine.get("torch_compile") and levers["compile"] == "per-layer":
        notes.append("The baseline's torch_compile compiles the whole model; it was measured compiled layer by layer.")
    left_out = sorted(set(mine) - READ)
    if left_out:
        notes.append(f"Of the baseline's arguments these were not taken into account: {', '.join(left_out)}.")
    wanted = micro * int(mine.get("gradient_accumulation_steps", 1))
    if mine and wanted != effective:
        notes.append(
            f"The baseline's effective batch of {wanted} became the job's {effective}, so that both do the same work."
        )
    configuration = Configuration(
        method=method,
        levers=levers,
        effective_batch_size=effective,
        learning_rate=learning_rate(spec, effective),
        micro_batch_size=min(micro, effective),
    )
    return configuration, tuple(notes)


def precise(measurement: Measurement) -> bool:
    """Whether it computes in fp32, so that others can be held to its numbers exactly."""
    levers = measurement.configuration.levers.items()
    rounded = any(LEVERS[name].choice(choice).changes_numerics for name, choice in levers)
    return not rounded and measurement.weights_dtype in (None, "float32")


def reference_of(measured: Measurement) -> Measurement | None:
    """The baseline with fp32 master weights, for losses to be compared with, or None where it has them.

    Trained in a checkpoint's 16 bits throughout, the baseline itself drifts (pure bf16: 3.6e-2 in 40 steps), and
    better configurations would be the ones to look wrong. Adapters are kept in fp32 in any case.
    """
    configuration = measured.configuration
    if configuration.method != "full" or measured.weights_dtype in (None, "float32"):
        return None
    levers = {**configuration.levers, "precision": "fp32"}
    # Half the micro batch: four bytes a weight have to fit where two did.
    micro = max(1, (measured.micro_batch_size or 2) // 2)
    changed = configuration.model_copy(update={"levers": levers, "micro_batch_size": micro})
    return measured.model_copy(update={"configuration": changed, "micro_batch_size": micro})


def _levers(mine: dict[str, Any]) -> dict[str, str]:
    """The levers that TrainingArguments set."""
    levers: dict[str, str] = {}
    for flag, choice in (("bf16", "bf16-mixed"), ("fp16", "fp16-mixed"), ("tf32", "tf32")):
        if mine.get(flag):
            levers.setdefault("precision", choice)
    if mine.get("optim") in OPTIMIZERS:
        levers["optimizer"] = OPTIMIZERS[mine["optim"]]
    if mine.get("gradient_checkpointing"):
        levers["checkpointing"] = "full"
    if mine.get("torch_compile"):
        # With checkpointing the whole model's graph breaks under adapters.
        levers["compile"] = "per-layer" if mine.get("gradient_checkpointing") else "whole"
    if mine.get("group_by_length") or mine.get("train_sampling_strategy") == "group_by_length":
        levers["batching"] = "grouped"
    if mine.get("attn_implementation") in LEVERS["attention"].names:
        levers["attention"] = mine["attn_implementation"]
    return levers
