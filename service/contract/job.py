"""JobSpec: what a user asks for. Submitted as YAML or JSON; every mistake gets one sentence."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from service.contract.base import Contract

TASKS = ("causal-lm", "sequence-classification")
METHODS = ("lora", "qlora", "full")
Method = Literal["lora", "qlora", "full"]
Task = Literal["causal-lm", "sequence-classification"]
Positive = Annotated[int, Field(ge=1)]


class ModelSpec(Contract):
    """The model: a hub id or a local folder, its revision, and whether its weights are loaded or drawn."""

    source: str = Field(min_length=1, examples=["examples/llama-13m"], description="Hub id or local folder.")
    revision: str | None = None
    weights: Literal["pretrained", "random"] = "pretrained"


class Columns(Contract):
    """Names of the dataset's columns. Unset ones are recognised by their usual names."""

    prompt: str | None = None
    completion: str | None = None
    messages: str | None = None
    text: str | None = None
    label: str | None = None


class Splits(Contract):
    """Which rows train and which validate.

    `column` selects rows of one file by value; without it `train` and `validation` name files of a folder
    or of a hub dataset. With no validation rows named, `validation_fraction` of the training rows is held out.
    """

    train: str = "train"
    validation: str | None = None
    column: str | None = None
    validation_fraction: float = Field(default=0.05, gt=0, lt=0.9)


class DatasetSpec(Contract):
    """The data: a hub id, a folder, or a jsonl / csv / parquet file; rows are cut at `max_length` tokens."""

    source: str = Field(min_length=1, examples=["examples/data/functions.jsonl"])
    revision: str | None = None
    columns: Columns = Columns()
    max_length: int = Field(default=1024, ge=8, description="Tokens; longer samples are cut.")
    splits: Splits = Splits()


class LoraSpec(Contract):
    """The adapter of LoRA and QLoRA (Hu et al. 2021, Dettmers et al. 2023); names are peft's."""

    r: Positive = 16
    alpha: float = Field(default=32, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: str | tuple[str, ...] = "all-linear"


class TrainingSpec(Contract):
    """What is learnt and how. The search never changes these, but for an effective batch left unset."""

    epochs: float = Field(default=3.0, gt=0)
    learning_rate: float = Field(default=2e-4, gt=0, le=1)
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0, lt=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    seed: int = Field(default=0, ge=0)
    effective_batch_size: Positive | None = Field(
        default=None, description="Samples an optimizer step. Held when given; part of the answer when not."
    )


class SearchSpec(Contract):
    """What may be tried, how long, and how sure the answer has to be."""

    levers: tuple[str, ...] | None = Field(default=None, description="Levers to vary; all when not given.")
    fixed: dict[str, str] = Field(default_factory=dict, description="Lever -> the one choice to use.")
    objective: Literal["wall-clock", "throughput"] = "wall-clock"
    trials: int = Field(default=30, ge=2, le=1000)
    minutes: float = Field(default=60.0, gt=0, le=10_000)
    quality: Literal["preserve", "allow"] = "preserve"
    verify: Literal["quick", "full"] = "full"
    max_micro_batch_size: Positive | None = Field(default=None, description="Never probe or use a larger one.")
    soak_steps: Positive | None = Field(default=None, description="Steps of the soak; 200, or 8 with verify: quick.")
    seed: int = Field(default=0, ge=0)


class HardwareSpec(Contract):
    """Which worker may measure, and how much of its memory may be used."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    name: str | None = Field(default=None, description="Part of the device's name, such as 'H200'.")
    memory_gib: float | None = Field(default=None, gt=0, description="Memory cap in GiB.")


class JobSpec(Contract):
    """One finetuning job to find the fastest stable configuration for."""

    name: str = Field(default="job", min_length=1, max_length=200)
    labels: dict[str, str] = Field(default_factory=dict)
    model: ModelSpec
    task: Task = "causal-lm"
    dataset: DatasetSpec
    method: tuple[Method, ...] = ("lora",)
    lora: LoraSpec = LoraSpec()
    training: TrainingSpec = TrainingSpec()
    search: SearchSpec = SearchSpec()
    hardware: HardwareSpec = HardwareSpec()
    baseline: Literal["default"] | dict[str, Any] = Field(
        default="default",
        description="'default': what a Trainer user gets without thinking; or your own TrainingArguments as JSON.",
    )

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
    def _columns_fit_the_task(self) -> JobSpec:
        columns = self.dataset.columns
        if self.task == "sequence-classification" and (columns.prompt or columns.messages):
            raise ValueError("sequence-classification reads columns text and label, not prompt or messages")
        if self.task == "causal-lm" and columns.label:
            raise ValueError("causal-lm has no label column; did you mean task: sequence-classification?")
        if bool(columns.prompt) != bool(columns.completion):
            raise ValueError("prompt and completion columns go together; name both or neither")
        return self
