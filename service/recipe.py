"""The fields of a training Recipe (training/recipe.py), worked out from a job and a configuration.

The worker makes a Recipe of them; the export prints the training code for them. Plain data: the service imports nothing
of `training`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from service.contract.form import DataForm
from service.contract.job import JobSpec, TrainingSpec
from service.contract.measurement import DatasetFacts
from service.levers import LEVERS
from service.levers.adapter import ATTENTION
from service.levers.attention import TOLD, TOLD_ALWAYS
from service.levers.batching import GROUP_STEPS, PACKED, ROWS
from service.levers.compile import GRAPHS
from service.levers.head import WITHOUT_LOGITS
from service.levers.optimizer import WHOLE_STEP
from service.rows import ENDINGS
from service.tasks import TASKS

SCHEDULES = {"constant": "constant_with_warmup"}  # transformers' `constant` would leave the warm-up out


@dataclass(frozen=True)
class Applied:
    """A choice as the training code applies it: the same fields as training.recipe.Choice."""

    lever: str
    function: str
    options: Mapping[str, Any] = field(default_factory=dict)


def recipe_fields(
    spec: JobSpec,
    method: str,
    levers: Mapping[str, str],
    learning_rate: float,
    effective_batch_size: int,
    micro_batch_size: int = 1,
    evaluation_batch_size: int = 1,
    dataset: DatasetFacts | None = None,
    pin_memory: bool = False,
) -> dict[str, Any]:
    """All fields of a Recipe. Where `dataset` is not known yet, the data may be of any format, and has no columns."""
    training, splits, batching = spec.training, spec.dataset.splits, levers["batching"]
    task, attention = TASKS[spec.task], attention_implementation(levers["attention"])
    one_shape = batching in ROWS and levers["compile"] in GRAPHS
    options = {name: dict(LEVERS[name].choice(choice).options) for name, choice in levers.items()}
    return {
        "task": spec.task,
        "method": method,
        "model": spec.model.source,
        "source_options": {"revision": spec.model.revision} if spec.model.revision else {},
        "random_weights": spec.model.weights == "random",
        "pickled_weights": False,
        "dataset": spec.dataset.source,
        "dataset_revision": spec.dataset.revision,
        "dataset_is_folder": dataset.is_folder if dataset else True,
        "dataset_is_local": dataset.is_local if dataset else True,
        "formats": dataset.formats if dataset and dataset.formats else ENDINGS,
        "columns": dict(dataset.columns) if dataset else {},
        "needed": TASKS[spec.task].needed(dataset.columns) if dataset else (),
        **(dataset.form if dataset else DataForm()).model_dump(),
        "split_column": splits.column,
        "train_split": splits.train,
        "validation_split": splits.validation,
        "validation_fraction": splits.validation_fraction,
        "max_length": spec.dataset.max_length,
        "loss_on": training.loss_on,
        "epochs": training.epochs,
        "learning_rate": learning_rate,
        "schedule": schedule_of(training),
        "warmup_ratio": training.warmup_ratio,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "seed": training.seed,
        "evaluation_steps": training.evaluation_steps,
        "micro_batch_size": micro_batch_size,
        "effective_batch_size": effective_batch_size,
        "evaluation_batch_size": evaluation_batch_size,
        "packed": batching in PACKED,
        "rows_are_packed": batching in ROWS,
        # Plain padding passes the mask as Trainer's collator does; the others only where the task needs it.
        "masked": batching not in PACKED and (task.needs_mask or batching == LEVERS["batching"].baseline),
        "labels_are_classes": task.labels_are_classes,
        "tells_where_samples_end": attention == TOLD_ALWAYS or (attention in TOLD and batching in PACKED),
        "tells_what_is_learnt": levers["head"] in WITHOUT_LOGITS,
        "fills_micro_batches": one_shape,
        "pad_multiple": 0 if one_shape else options["padding"]["multiple"],
        "group_steps": GROUP_STEPS[spec.search.verify],
        **arithmetic(method, options["precision"]),
        "attention": attention,
        "heads": task.heads,
        "lora": lora_config(spec, levers) if method != "full" else None,
        "autocast_adapter": options["adapter"].get("autocast_adapter_dtype", True),
        "empty_cache": "interval" in options["cache"],
        "pin_memory": pin_memory and options["loading"].get("pins", True),
        **{name: applied(name, levers[name]) for name in ("batching", "optimizer")},
        **{name: next(iter(of_stage(name, levers)), None) for name in ("loading", "evaluation")},
        "marks_embeddings": "embeddings" in options["optimizer"],
        "steps_in_backward": levers["optimizer"] in WHOLE_STEP,
        "quantization": applied("quantization", levers["quantization"]) if method == "qlora" else None,
        "before_loading": of_stage("load", levers),
        "on_base": of_stage("base", levers),
        "on_model": of_stage("model", levers),
        "compiled": of_stage("compiled", levers),
        "evaluates_eagerly": levers["compile"] in GRAPHS,
    }


def schedule_of(training: TrainingSpec) -> str:
    """The job's learning rate schedule by its name in transformers."""
    return SCHEDULES.get(training.schedule, training.schedule)


def arithmetic(method: str, precision: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the lever `precision`. A frozen base needs no more than 16 bits; what is trained stays fp32."""
    weights = precision["weights"]
    return {
        "weights": precision.get("adapter_weights", weights) if method != "full" else weights,
        "matmul": precision.get("matmul", None if weights == "auto" else "highest"),
        "autocast": precision.get("autocast"),
        "autocast_cache": precision.get("cache", True),
        "loss_scaling": bool(precision.get("scaler")),
    }


def attention_implementation(choice: str) -> str:
    """transformers' `attn_implementation`: `sdpa-flash` is a setting of `sdpa`, and so on."""
    implementation: str = LEVERS["attention"].choice(choice).from_pretrained["attn_implementation"]
    return implementation


def applied(lever: str, choice: str) -> Applied:
    """The choice's function and options."""
    chosen = LEVERS[lever].choice(choice)
    assert chosen.function is not None, f"{lever}={choice} is data"
    return Applied(lever, chosen.function, dict(chosen.options))


def of_stage(stage: str, levers: Mapping[str, str]) -> tuple[Applied, ...]:
    """The choices of a stage that change something, in the catalogue's order."""
    return tuple(
        applied(name, levers[name])
        for name, lever in LEVERS.items()
        if lever.stage == stage and lever.choice(levers[name]).function
    )


def lora_config(
    spec: JobSpec, levers: Mapping[str, str], excludes: Sequence[str] = (), saves: Sequence[str] = ()
) -> dict[str, Any]:
    """peft's LoraConfig arguments; the modules that it excludes and those that it saves whole are the model's."""
    options = dict(LEVERS["adapter"].choice(levers["adapter"]).options)
    options.pop("autocast_adapter_dtype", None)  # an argument of get_peft_model
    targets = ATTENTION if options.pop("attention_only", False) else spec.lora.target_modules
    if excludes:
        options["exclude_modules"] = list(excludes)
    if saves:
        options["modules_to_save"] = list(saves)
    return options | {
        "r": spec.lora.r,
        "lora_alpha": spec.lora.alpha,
        "lora_dropout": spec.lora.dropout,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "bias": "none",
        "task_type": TASKS[spec.task].peft,
    }
