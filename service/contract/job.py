"""JobSpec: what a user asks for, submitted as YAML or JSON. Every mistake in it is told in one sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from service.contract.base import Contract
from service.tasks import TASKS

METHODS = ("lora", "qlora", "full")
Method = Literal["lora", "qlora", "full"]


def _known_task(name: str) -> str:
    """The name itself; ValueError when there is no such task."""
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}; there are: {', '.join(TASKS)}")
    return name


Task = Annotated[str, AfterValidator(_known_task), WithJsonSchema({"type": "string", "enum": list(TASKS)})]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Source = Annotated[str, Field(min_length=1, max_length=4096)]
Revision = Annotated[str, Field(min_length=1, max_length=200)]
IDEMPOTENCY_KEY = "^[!-~]{1,200}$"  # what a submission may be named by, so that it can be sent again
Label = Annotated[str, Field(min_length=1, max_length=200)]
DEEPEST = 16  # levels of mappings and lists in a job
UNSTORABLE = re.compile("[\0\ud800-\udfff]")  # NUL, and halves of surrogate pairs


def check_storable(value: object, place: str = "", depth: int = 0) -> None:
    """ValueError where a value cannot be stored, or mappings and lists nest too deeply.

    Databases keep no NUL and no half of a surrogate pair in text; PostgreSQL's JSON has no infinite numbers.
    """
    if depth > DEEPEST:
        raise ValueError("it is nested too deeply")
    if isinstance(value, str):
        if UNSTORABLE.search(value):
            raise ValueError(f"{place or 'a name'} holds a NUL or half a character, which no database keeps")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{place} must be a finite number, not {value}")
    elif isinstance(value, Mapping):
        for key, one in value.items():
            check_storable(key, place, depth)
            check_storable(one, f"{place}.{key}".lstrip("."), depth + 1)
    elif isinstance(value, list | tuple):
        for one in value:
            check_storable(one, place, depth + 1)


class Asked(Contract):
    """The base of what a user writes: numbers must be finite, and true or false is not taken for a number or text."""

    model_config = ConfigDict(allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError(f"cannot be {str(value).lower()}; if it is meant as text, quote it")
        return value


class ModelSpec(Asked):
    """The model: a hub id or a local folder, its revision, and whether its weights are loaded or drawn at random."""

    source: Source = Field(examples=["examples/llama-13m"], description="Hub id or local folder.")
    revision: Revision | None = Field(default=None, description="Branch, tag or commit of a hub model.")
    weights: Literal["pretrained", "random"] = Field(
        default="pretrained",
        description="`random` draws weights by the model's configuration: timings and memory hold, losses mean little.",
    )


class Columns(Asked):
    """Names of the dataset's columns. Columns that are not named here are recognised by their usual names."""

    prompt: str | None = Field(default=None, description="What is asked; not learnt unless training.loss_on is all.")
    completion: str | None = Field(default=None, description="The answer to it, which is learnt.")
    messages: str | None = Field(default=None, description="A conversation: a list of turns with a role and content.")
    text: str | None = Field(
        default=None, description="A plain text; with sequence-classification, what is classified."
    )
    label: str | None = Field(default=None, description="The text's class, by name or by number from 0 on.")
    context: str | None = Field(
        default=None, description="What the instruction is about; it is appended to the prompt on a line of its own."
    )
    tools: str | None = Field(
        default=None, description="The tools that a conversation may call, as a list or as its JSON text."
    )


class Splits(Asked):
    """Which rows train and which validate.

    `column` selects rows by value; without it `train` and `validation` name files of a folder
    or of a hub dataset. With no validation rows named, `validation_fraction` of the training rows is held out.
    """

    train: str = Field(
        default="train", description="The split that trains; where no file is named after train, all others do."
    )
    validation: str | None = Field(default=None, description="The split that validates.")
    column: str | None = Field(default=None, description="The column that names each row's split.")
    validation_fraction: float = Field(
        default=0.05, gt=0, lt=0.9, description="Share of the training rows that is held out where no split validates."
    )


class DatasetSpec(Asked):
    """The data: a hub id, a folder, or a jsonl / json / csv / parquet file; rows are cut at `max_length` tokens."""

    source: Source = Field(
        examples=["examples/data/functions.jsonl"],
        description="Hub id, a folder, or a jsonl, json, csv or parquet file.",
    )
    config: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="Which of a dataset's configurations, as its card names them: the `name` of `load_dataset`.",
    )
    revision: Revision | None = Field(default=None, description="Branch, tag or commit of a hub dataset.")
    columns: Columns = Columns()
    max_length: int = Field(default=1024, ge=8, le=10_000_000, description="Tokens; longer samples are cut.")
    splits: Splits = Splits()
    chat_template: str | None = Field(
        default=None,
        min_length=1,
        max_length=100_000,
        description="For conversations, in place of the tokenizer's: a template's text, a .jinja file, or chatml.",
    )

    @field_validator("chat_template")
    @classmethod
    def _text_file_or_name(cls, value: str | None) -> str | None:
        if value is None or value == "chatml" or "{" in value or value.endswith(".jinja"):
            return value
        raise ValueError(f"must be a template's text, a path that ends in .jinja, or chatml, not {value!r:.80}")

    @property
    def template_file(self) -> str | None:
        """The path of the chat template, where the job names a file."""
        template = self.chat_template or ""
        return template if template.endswith(".jinja") and "{" not in template else None


class LoraSpec(Asked):
    """The adapter of LoRA and QLoRA (Hu et al. 2021, Dettmers et al. 2023); names are peft's."""

    r: Positive = Field(default=16, description="The rank.")
    alpha: float = Field(default=32, gt=0, description="The adapter's output is multiplied by alpha / r.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Probability of dropout on the adapter's input.")
    target_modules: str | tuple[str, ...] = Field(
        default="all-linear",
        description="Layers that get an adapter: a list of the ends of their names, one regular expression for whole "
        "names, or all-linear for all but the head.",
    )

    @field_validator("target_modules", mode="before")
    @classmethod
    def _text_or_texts(cls, value: object) -> object:
        every = value if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(one, str) for one in every):
            raise ValueError(f"must be text or a list of text, not {value!r:.80}")
        return value


class TrainingSpec(Asked):
    """How the model is trained.

    The search changes none of these, except an effective batch that is not given, and with it the learning rate.
    """

    epochs: float = Field(default=3.0, gt=0, le=1_000_000, description="Times that each sample is trained on.")
    learning_rate: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="The highest of the schedule, at the effective batch that is given or, without one, at the "
        "baseline's, and it grows with the batch. When not given, 2e-4 for adapters, and Trainer's 5e-5 for full.",
    )
    schedule: Literal["linear", "cosine", "constant"] = Field(
        default="linear", description="How the learning rate goes on after its warm-up."
    )
    warmup_ratio: float = Field(
        default=0.03, ge=0, lt=1, description="Share of the steps in which the learning rate rises from 0."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's, of matrices only: biases and norms have none.")
    max_grad_norm: float = Field(
        default=1.0, ge=0, description="Gradients of a larger norm are scaled down to it; 0 turns that off."
    )
    seed: Seed = Field(default=0, description="Of the samples' order, of new weights and of dropout.")
    loss_on: Literal["completion", "all"] = Field(
        default="completion", description="causal-lm: learn only completions and the assistant's turns, or all tokens."
    )
    evaluation_steps: Positive | None = Field(
        default=None, description="Optimizer steps between evaluations; when not given, only one at the end."
    )
    effective_batch_size: Positive | None = Field(
        default=None, description="Samples an optimizer step. The search chooses it only when it is not given."
    )

    def rate(self, method: Method) -> float:
        """The learning rate of a method: whole weights are trained with less of it than a new adapter."""
        return self.learning_rate if self.learning_rate is not None else 5e-5 if method == "full" else 2e-4


class RepeatedSearch(Asked):
    """The sizes and the rate at which a recommendation's levers are measured again."""

    effective_batch_size: Positive = Field(description="Samples an optimizer step.")
    micro_batch_size: Positive = Field(description="Samples, or rows where they are packed, of a pass.")
    learning_rate: float = Field(gt=0, le=1, description="The highest of the schedule.")


class SearchSpec(Asked):
    """What may be tried, for how long, and how thoroughly the answer is verified."""

    levers: tuple[str, ...] | None = Field(default=None, description="Levers to vary; all when not given.")
    fixed: dict[str, str] = Field(default_factory=dict, description="Lever -> the only choice to use.")
    objective: Literal["wall-clock", "throughput", "memory", "cost"] = Field(
        default="wall-clock",
        description="What is best: the least wall-clock of the whole run; the most tokens a second; the least peak "
        "memory of what is not slower than the baseline; or the least cost, by hardware.price_per_hour.",
    )
    trials: int = Field(default=30, ge=2, le=1000, description="Most trials of the search, the baseline's among them.")
    minutes: float = Field(
        default=60.0,
        gt=0,
        le=10_000,
        description="For search and verification together. A busy machine's verification may end later, and says so.",
    )
    quality: Literal["preserve", "allow"] = Field(
        default="preserve", description="`allow` also tries choices that may change what is learnt; see docs/levers.md."
    )
    verify: Literal["quick", "standard", "strict"] = Field(
        default="standard", description="How deeply the answer is verified: compared steps, blocks, length of the soak."
    )
    max_micro_batch_size: Positive | None = Field(default=None, description="Never probe or use a larger micro batch.")
    again: RepeatedSearch | None = Field(
        default=None,
        description="Measure what is fixed at these sizes, and the baseline as it is; what `dynotune verify` asks for.",
    )
    soak_steps: Positive | None = Field(
        default=None,
        description="Steps of the soak; when not given at least 200, or 40 with verify: quick, 1,000 with strict, and "
        "more where they are short.",
    )
    reuse: bool = Field(
        default=True, description="Whether trials of earlier jobs on the same hardware order this job's trials."
    )
    seed: Seed = Field(
        default=0, description="Of the search: the same job with the same history plans the same trials."
    )

    @field_validator("verify", mode="before")
    @classmethod
    def _older_name(cls, value: object) -> object:
        return "standard" if value == "full" else value


class HardwareSpec(Asked):
    """Which worker may measure, and how much of its memory may be used."""

    device: str = Field(
        default="auto",
        pattern="^[a-z][a-z0-9-]{0,19}$",
        description="auto, or the kind of device that a worker must have: cpu, cuda.",
    )
    name: str | None = Field(
        default=None, min_length=1, max_length=100, description="Part of the device's name, such as 'H200'."
    )
    memory_gib: float | None = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="Memory cap in GiB: of a host, what a trial's process may take; of a GPU, what PyTorch may, beside "
        "which there are its context (half a GiB or so) and the pages of paged optimizers.",
    )
    price_per_hour: float | None = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="Of the device, in any currency; the answer says what the run costs.",
    )


class JobSpec(Asked):
    """One finetuning job to find the fastest stable configuration for."""

    name: str = Field(default="job", min_length=1, max_length=200, description="What lists show it as.")
    labels: dict[Label, Annotated[str, Field(max_length=200)]] = Field(
        default_factory=dict,
        max_length=100,
        description="Names and values of your own, by which lists can be filtered.",
    )
    priority: int = Field(
        default=0,
        ge=-100,
        le=100,
        description="Jobs of higher priority are served first; one step counts as one hour of waiting.",
    )
    model: ModelSpec
    task: Task = Field(
        default="causal-lm",
        description="What is learnt. " + " ".join(f"{name}: {task.summary}" for name, task in TASKS.items()),
    )
    dataset: DatasetSpec
    method: tuple[Method, ...] = Field(
        default=("lora",), description="One or several; each gets a winner, and the best of them is recommended."
    )
    lora: LoraSpec = LoraSpec()
    training: TrainingSpec = TrainingSpec()
    search: SearchSpec = SearchSpec()
    hardware: HardwareSpec = HardwareSpec()
    baseline: Literal["default"] | dict[str, JsonValue] = Field(
        default="default",
        description="'default': what transformers' Trainer does by default; or your own TrainingArguments as JSON.",
    )

    @model_validator(mode="before")
    @classmethod
    def _text_that_can_be_stored(cls, data: object) -> object:
        check_storable(data)
        return data

    @field_validator("baseline", mode="before")
    @classmethod
    def _baseline_or_arguments(cls, value: object) -> object:
        if value != "default" and not isinstance(value, dict):
            raise ValueError(f"must be 'default' or a mapping of TrainingArguments, not {value!r:.80}")
        return value

    @field_validator("method", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("method")
    @classmethod
    def _no_repeats(cls, value: tuple[Method, ...]) -> tuple[Method, ...]:
        if not value:
            raise ValueError(f"needs at least one of {', '.join(METHODS)}")
        return tuple(dict.fromkeys(value))

    @model_validator(mode="after")
    def _weights_do_not_vanish(self) -> JobSpec:
        share = self.training.weight_decay * max(map(self.training.rate, self.method))
        if share >= 1:
            raise ValueError(
                f"training.weight_decay times training.learning_rate is {share:g} and must be less than 1: it is the "
                "share that each step takes from the weights"
            )
        return self

    @model_validator(mode="after")
    def _cost_has_a_price(self) -> JobSpec:
        if self.search.objective == "cost" and self.hardware.price_per_hour is None:
            raise ValueError(
                "search.objective: cost needs a price; set hardware.price_per_hour to what an hour of the device costs"
            )
        return self

    @model_validator(mode="after")
    def _columns_fit_the_task(self) -> JobSpec:
        columns, kinds = self.dataset.columns, TASKS[self.task].kinds
        for kind in columns.model_dump(exclude_none=True):
            if kind not in kinds:
                others = [name for name, task in TASKS.items() if kind in task.kinds]
                raise ValueError(
                    f"dataset.columns.{kind}: {self.task} has no {kind} column, it reads {', '.join(kinds)}; "
                    f"did you mean task: {' or '.join(others)}?"
                )
        if bool(columns.prompt) != bool(columns.completion):
            raise ValueError("prompt and completion columns go together; name both or neither")
        return self
