"""Keyword arguments for `TrainingArguments`, `LoraConfig`, `BitsAndBytesConfig` and `from_pretrained`."""

from __future__ import annotations

from typing import Any

from service.contract.job import JobSpec
from service.contract.recommendation import RecommendedConfiguration
from service.exports.job_settings import largest_divisor
from service.exports.merging import merged
from service.levers import LEVERS
from service.levers.batching import BUDGETED
from service.recipe import lora_config, schedule_of
from service.tasks import TASKS


def arguments(
    spec: JobSpec, configuration: RecommendedConfiguration, on_host: bool = False, weights: str | None = None
) -> dict[str, Any]:
    """The four argument dictionaries, and what they cannot express, as fields of a Winner.

    `on_host`: it was measured on a CPU, which Trainer has to be told, or it refuses bf16. `weights` is the dtype that
    the weights had, in which a quantised model computes where nothing else is asked for.
    """
    training: dict[str, Any] = {
        "per_device_train_batch_size": configuration.micro_batch_size,
        "gradient_accumulation_steps": configuration.gradient_accumulation_steps,
        "per_device_eval_batch_size": configuration.evaluation_batch_size,
        "num_train_epochs": spec.training.epochs,
        "learning_rate": configuration.learning_rate,
        "lr_scheduler_type": schedule_of(spec.training),
        "warmup_steps": spec.training.warmup_ratio,
        "weight_decay": spec.training.weight_decay,
        "max_grad_norm": spec.training.max_grad_norm,
        "seed": spec.training.seed,
        "logging_nan_inf_filter": False,
        "save_total_limit": 2,  # or every checkpoint is kept, which fills disks
    }
    if spec.training.evaluation_steps:
        training |= {"eval_strategy": "steps", "eval_steps": spec.training.evaluation_steps}
    if on_host:
        training["use_cpu"] = True
    pretrained: dict[str, Any] = {}
    cannot: list[str] = []
    for name, choice_name in configuration.levers.items():
        choice = LEVERS[name].choice(choice_name)
        training = merged(training, choice.training_arguments)
        pretrained |= choice.from_pretrained
        if configuration.method != "full":
            pretrained |= choice.adapter_from_pretrained
        if choice.not_expressible:
            cannot.append(f"{name}={choice_name}: {choice.not_expressible}")
    if configuration.rows_are_packed:
        training |= _unpacked(configuration)
        cannot.append("micro_batch_size counts packed rows; Trainer counts samples, so its batch is one sample here")
    elif configuration.levers["batching"] in BUDGETED:
        training |= _counted(configuration)
        cannot.append("micro_batch_size follows from the token budget; Trainer's is the next that divides the step")
    return {
        "TrainingArguments": training,
        "LoraConfig": lora_config(
            spec, configuration.levers, configuration.adapter_excludes, configuration.adapter_saves
        )
        if configuration.method != "full"
        else None,
        "BitsAndBytesConfig": quantization(spec, configuration, weights) if configuration.method == "qlora" else None,
        "from_pretrained": pretrained,
        "not_expressible": tuple(cannot),
    }


def _counted(configuration: RecommendedConfiguration) -> dict[str, int]:
    """A batch in samples that holds the effective batch and fits, for a trainer that counts samples."""
    effective = configuration.effective_batch_size
    micro = largest_divisor(effective, configuration.micro_batch_size)
    return {"per_device_train_batch_size": micro, "gradient_accumulation_steps": effective // micro}


def _unpacked(configuration: RecommendedConfiguration) -> dict[str, int]:
    """A batch in samples that holds the effective batch, for a trainer that does not pack."""
    return {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": configuration.effective_batch_size,
    }


def quantization(spec: JobSpec, configuration: RecommendedConfiguration, weights: str | None) -> dict[str, Any] | None:
    """transformers' BitsAndBytesConfig arguments, or None where torchao quantises."""
    choice = LEVERS["quantization"].choice(configuration.levers["quantization"])
    if choice.not_expressible:
        return None
    precision = LEVERS["precision"].choice(configuration.levers["precision"]).options
    own = weights if precision["weights"] == "auto" and weights else "float32"  # as training/model.py has it
    whole = [*TASKS[spec.task].heads, *configuration.adapter_saves]
    return ({"llm_int8_skip_modules": whole} if whole else {}) | {
        **choice.options,
        "bnb_4bit_compute_dtype": precision.get("autocast", own),
    }
