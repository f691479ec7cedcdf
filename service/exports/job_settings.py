"""What an exported file says of the job besides its levers: batches, data, schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from service.contract.job import JobSpec
from service.contract.measurement import DatasetFacts
from service.contract.recommendation import Recommendation
from service.errors import NotYet
from service.levers.batching import PACKED
from service.recipe import schedule_of
from service.rows import SEPARATORS

# By what share of its rows a step of packed rows may be larger or smaller than the effective batch asks for. Chosen,
# not measured: with less, a step would have more and smaller micro batches.
NEARLY = 0.15


@dataclass(frozen=True)
class Batch:
    """The samples (or packed rows of max_length tokens) of a micro batch, and the micro batches of a step."""

    micro: int
    accumulation: int
    evaluation: int


def spec_of(recommendation: Recommendation) -> JobSpec:
    """The job that led to a recommendation."""
    return JobSpec.model_validate(recommendation.spec)


def data_of(recommendation: Recommendation) -> DatasetFacts:
    """What is known of the data; NotYet where its columns are not known."""
    if recommendation.dataset is None or not recommendation.dataset.columns:
        raise NotYet("What was measured does not say which columns the data has; run the job again for this export.")
    return recommendation.dataset


def on_cpu(recommendation: Recommendation) -> bool:
    """Whether it was measured on a host's CPU, which trainers have to be asked for where there is a GPU."""
    return bool(recommendation.TrainingArguments.get("use_cpu"))


def on_gpu(recommendation: Recommendation) -> bool:
    """Whether it was measured on an NVIDIA GPU: on one, as all trials are."""
    return recommendation.environment.get("capability") is not None


def was_packed(recommendation: Recommendation) -> bool:
    """Whether rows of several samples were measured."""
    return recommendation.configuration.levers["batching"] in PACKED


def largest_divisor(effective: int, most: int) -> int:
    """The largest micro batch up to `most` samples that divides the step, so that the effective batch holds."""
    return max(size for size in range(1, min(most, effective) + 1) if effective % size == 0)


def batch(recommendation: Recommendation, packs: bool = False, row_by_row: bool = False) -> Batch:
    """The measured batch for a trainer that counts samples, or packed rows if it `packs` (one a time if `row_by_row`).

    Samples: the largest size up to the measured one that divides the step, so that the effective batch holds; a row of
    one sample takes no more memory than one of several. Rows: as many as hold a step's samples by their mean length.
    """
    chosen = recommendation.configuration
    effective, most = chosen.effective_batch_size, chosen.micro_batch_size
    if packs:
        data, length = data_of(recommendation), spec_of(recommendation).dataset.max_length
        most = most if chosen.rows_are_packed else max(1, (chosen.token_budget or 0) // length)
        rows = max(1, round(effective * data.tokens / max(1, data.rows) / length))
        return Batch(*split(rows, 1 if row_by_row else most), chosen.evaluation_batch_size)
    micro = largest_divisor(effective, most)
    return Batch(micro, effective // micro, chosen.evaluation_batch_size)


def split(rows: int, most: int) -> tuple[int, int]:
    """(rows of a micro batch, micro batches of a step): the fewest that together have nearly as many rows."""
    for steps in range(math.ceil(rows / most), rows):
        if abs(steps * round(rows / steps) - rows) <= NEARLY * rows:
            return round(rows / steps), steps
    return 1, rows


def lora_targets(recommendation: Recommendation) -> str | list[str]:
    """The modules that get an adapter, as peft's `target_modules` takes them."""
    found = (recommendation.LoraConfig or {}).get("target_modules", "all-linear")
    return found if isinstance(found, str) else list(found)


def whole(number: float) -> int | float:
    """The number as an int where it is whole, as some parsers want it."""
    return int(number) if number == int(number) else number


def trainer_arguments(recommendation: Recommendation, size: Batch, between: str = "epoch") -> dict[str, Any]:
    """The job's part of transformers' TrainingArguments: batches, epochs, learning rate, evaluation.

    `between` is when to evaluate where the job asks for the last evaluation only: `no` where that is made anyway.
    """
    training = spec_of(recommendation).training
    every = training.evaluation_steps
    return {
        "per_device_train_batch_size": size.micro,
        "gradient_accumulation_steps": size.accumulation,
        "per_device_eval_batch_size": size.evaluation,
        "num_train_epochs": whole(training.epochs),
        "learning_rate": recommendation.configuration.learning_rate,
        "lr_scheduler_type": schedule_of(training),
        "warmup_steps": training.warmup_ratio,  # below 1 a share of all steps
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "seed": training.seed,
        **({"eval_strategy": "steps", "eval_steps": every} if every else {"eval_strategy": between}),
        "logging_steps": 10,
        "save_total_limit": 2,  # or every checkpoint is kept, which fills disks
        **({"use_cpu": True} if on_cpu(recommendation) else {}),
    }


LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def loader(data: DatasetFacts) -> str:
    """The name by which the library `datasets` reads files of the data's format."""
    return LOADERS.get(data.formats[0] if data.formats else ".jsonl", "json")


def hub_configuration(recommendation: Recommendation) -> str | None:
    """The configuration of a hub dataset that the job names, which `load_dataset` and the trainers take as well."""
    return None if data_of(recommendation).is_local else spec_of(recommendation).dataset.config


def unread(recommendation: Recommendation, *names: str, reads: tuple[str, ...] = ()) -> list[str]:
    """Sentences on what of the data another trainer reads in another way; columns are to have one of the `names`.

    `reads` is what its file says of the data: the `split` that trains, the data's `revision`, the chat `template`, the
    separator of `csv` files, and that whole `numbers` are text.
    """
    spec, data = spec_of(recommendation), data_of(recommendation)
    found = [
        "the trainer reads, cuts and tokenises the data itself, so that samples may differ by a token or a template"
    ]
    if spec.dataset.splits.column:
        found.append(
            f"rows are not chosen by the column {spec.dataset.splits.column!r}: write training and validation rows to "
            "files of their own first"
        )
    elif data.is_folder:
        found.append("which files of a folder train and which validate is left to the loader: look at what it took")
    if spec.dataset.splits.validation:
        found.append(f"a share of the training rows validates, not the split {spec.dataset.splits.validation!r}")
    if not data.is_local and spec.dataset.splits.train != "train" and "split" not in reads:
        found.append(f"rows are not taken from the split {spec.dataset.splits.train!r}: write them to a file first")
    if not data.is_local and spec.dataset.revision and "revision" not in reads:
        found.append(f"the data are of their newest revision, not of {spec.dataset.revision}")
    if data.is_local and (data.form.train_files or data.form.below):
        places = " and ".join(data.form.train_files or (data.form.below,))
        found.append(f"of the folder only {places} was trained on: name these files in place of it")
    if data.form.chat_template and "template" not in reads:
        found.append(
            "conversations are not written by dataset.chat_template: set it as the tokenizer's chat_template, save the "
            "tokenizer with the model's files, and name their folder as the model"
        )
    if (separator := data.form.csv_options.get("delimiter")) and "csv" not in reads:
        found.append(f"it reads csv files as separated by commas, not by {SEPARATORS[separator]}: rewrite them first")
    if data.form.numbers_as_text and "numbers" not in reads:
        found.append("it wants text where some rows have whole numbers: write these as text, in quotes, first")
    if data.form.content_parts:
        found.append(
            "contents that are lists of texts go to the chat template as lists, and it may write these: join them first"
        )
    if data.form.turn_weights:
        found.append("it may learn the assistant's turns with weight 0: look at what it does with them")
    wrong = [column for kind, column in data.columns.items() if names and kind != "context" and column not in names]
    if wrong:
        found.append(f"it reads columns named {' or '.join(names)}: rename {', '.join(map(repr, wrong))} first")
    if spec.model.weights == "random":
        found.append("the model was drawn at random for the measurement; here its weights are loaded")
    return found
