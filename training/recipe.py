"""What is trained and how: a frozen Recipe, which is passed to every function that depends on it.

service/recipe.py works the fields out from a job and a configuration. The export replaces `recipe.field` by the
field's value and `apply(recipe.field, ...)` by a call of the function that the field names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Choice:
    """A lever's choice: a function of training/levers/<lever>.py, and the options with which it is called."""

    lever: str
    function: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """How to train a job. Micro batches are counted in samples, or in packed rows where `rows_are_packed` says so."""

    # The job: what is learnt.
    task: str  # a module of training/tasks
    method: str  # lora, qlora or full
    model: str  # hub id or folder
    source_options: Mapping[str, Any]  # arguments of every `from_pretrained`: revision and trust_remote_code
    random_weights: bool
    pickled_weights: bool  # weights may be loaded from pickles where there are no safetensors
    # The data. `columns` names the file's column for each kind of column that the task reads, `needed` those that every
    # row has.
    dataset: str  # hub id, folder or file
    dataset_revision: str | None
    dataset_is_folder: bool
    dataset_is_local: bool
    formats: tuple[str, ...]  # file name endings
    columns: Mapping[str, str]
    needed: tuple[str, ...]
    below: str  # the folder within the dataset that is read; empty for all of it
    train_files: tuple[str, ...]  # patterns of the files that train; empty where files' names say which do
    validation_files: tuple[str, ...]
    csv_options: Mapping[str, Any]  # arguments of csv.DictReader
    json_arrays: bool  # a .json file may hold one array of rows
    numbers_as_text: bool  # a text column holds numbers
    sharegpt: bool  # the turns of conversations have `from` and `value`, not `role` and `content`
    content_parts: bool  # the content of some turns is a list of texts
    turn_weights: bool  # the assistant's turns with a `weight` of 0 are not learnt
    classes: Mapping[str, int]  # a label, as text -> its class number; empty where labels are the class numbers
    chat_template: str | None  # in place of the tokenizer's
    split_column: str | None
    train_split: str
    validation_split: str | None
    validation_fraction: float
    max_length: int  # tokens; longer samples are cut
    loss_on: str  # completion or all
    # The optimization.
    epochs: float
    learning_rate: float
    schedule: str  # a name that transformers' get_scheduler knows
    warmup_ratio: float
    weight_decay: float
    max_grad_norm: float  # 0 turns clipping off
    seed: int
    evaluation_steps: int | None
    # The batches.
    micro_batch_size: int
    effective_batch_size: int
    evaluation_batch_size: int
    batching: Choice
    packed: bool  # rows hold several samples
    rows_are_packed: bool  # rows are filled up to max_length, and a micro batch counts rows
    masked: bool  # batches have an attention mask
    labels_are_classes: bool  # one label a sample, not one a token
    tells_where_samples_end: bool  # batches have cu_seq_lens, for an attention kernel that takes no mask
    tells_what_is_learnt: bool  # batches have target_positions, for a loss that makes logits for those only
    fills_micro_batches: bool  # with empty rows, so that all have one shape, as CUDA graphs of packed rows need it
    pad_multiple: int  # rows are padded to a multiple of this many tokens; 0 pads to max_length
    group_steps: int  # optimizer steps over which batching `grouped` sorts samples by length
    loading: Choice | None  # None: batches are made in the training process
    pin_memory: bool  # batches are in pinned host memory, from which a GPU copies while it computes
    # The arithmetic.
    weights: str  # a torch dtype's name, or "auto" for the checkpoint's own
    matmul: str | None  # the argument of torch.set_float32_matmul_precision; None leaves it as the environment has it
    autocast: str | None  # a torch dtype's name
    autocast_cache: bool
    loss_scaling: bool  # for fp16 gradients, which underflow without
    # The model. `lora` are peft's LoraConfig arguments.
    attention: str  # transformers' attn_implementation
    before_loading: tuple[Choice, ...]
    on_base: tuple[Choice, ...]
    on_model: tuple[Choice, ...]
    compiled: tuple[Choice, ...]
    evaluates_eagerly: bool  # uncompiled, or the model would be compiled anew for each shape of an evaluation's batches
    quantization: Choice | None
    heads: tuple[str, ...]  # the task's output layers, which are trained whole and never quantised
    lora: Mapping[str, Any] | None
    autocast_adapter: bool  # the adapter is kept in fp32 over a 16-bit base
    optimizer: Choice
    marks_embeddings: bool  # the optimizer is told which parameters are embeddings
    steps_in_backward: bool  # the optimizer updates each weight as soon as its gradient is there
    empty_cache: bool  # empty CUDA's allocator cache after every optimizer step
    evaluation: Choice | None  # None: evaluate the model as it is trained


def apply(choice: Choice, *arguments: Any, **more: Any) -> Any:
    """Call the choice's function with its options."""
    module = import_module(f"training.levers.{choice.lever}")
    return getattr(module, choice.function)(*arguments, **more, **choice.options)


def task_of(recipe: Recipe) -> ModuleType:
    """The module of the recipe's task: what its samples are, and how its loss is computed."""
    return import_module(f"training.tasks.{recipe.task.replace('-', '_')}")
