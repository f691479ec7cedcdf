"""Builds what a trial trains: tokenizer, data, model with its adapter, levers applied, optimizer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from service.contract.child import ChildMessage, Prepared, Preparing, Workplace
from service.contract.configuration import Configuration
from service.contract.job import JobSpec
from service.contract.measurement import DatasetFacts
from service.levers.adapter import ATTENTION
from service.recipe import Applied, recipe_fields
from service.text import told_in_short
from training.errors import TrainingError
from training.model import (
    before_loading,
    change_base,
    change_model,
    compile_model,
    know_padding,
    loaded_model,
    model_config,
    random_model,
    with_adapter,
)
from training.optimization import make_optimizer
from training.recipe import Choice, Recipe
from training.source import tokenizer_of
from training.step import gradient_scaler
from worker import host
from worker.child import data as job_data
from worker.child import quantised, sources
from worker.child.behaviour import check_behaviour
from worker.child.lacking import check_attention, class_of
from worker.child.patterns import check_pattern
from worker.devices import Device
from worker.devices.base import is_out_of_memory

# Kinds of models whose position tables have a row for each number up to the padding token's, before position 0.
COUNTS_FROM_PADDING = (
    *("roberta", "camembert", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "xmod", "ibert"),
    *("data2vec-text", "mpnet", "longformer", "luke", "lilt", "markuplm", "layoutlmv3"),
)
CACHED_SHARE = 0.5  # of the memory that is available, into which a model's weights have to fit to be read ahead
READ_BYTES = 16 << 20  # at a time


@dataclass
class Bundle:
    """Everything that a trial trains with."""

    spec: JobSpec
    configuration: Configuration
    recipe: Recipe
    device: Device
    tokenizer: Any
    data: job_data.Data
    model: Any
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    load_seconds: float
    data_seconds: float
    prepare_seconds: float  # in the place of `data_seconds` in a job's first process, which does it for all
    skipped: int = 0  # updates in a row that the gradient scaler has skipped
    model_revision: str | None = None  # the commit that was loaded from the hub
    quantising_seconds: float = 0.0  # saved by loading weights that an earlier trial has quantised and stored
    load_peak_bytes: int | None = None
    unread: bytes = b""  # as many as the rows take that a run holds and a trial does not read

    @property
    def pad(self) -> int:
        """The id of the padding token."""
        return int(self.tokenizer.pad_token_id)

    @property
    def compiled(self) -> bool:
        """Whether the configuration compiles the model."""
        return bool(self.recipe.compiled)

    def new_optimizer(self) -> None:
        """Replace the optimizer by a fresh one, which drops the state that the memory probe has left in it."""
        if hasattr(self.optimizer, "release"):
            self.optimizer.release()
        del self.optimizer  # before the new one is made: two optimizers' states might not fit at the same time
        self.optimizer = make_optimizer(self.model, self.recipe)

    def compile(self) -> None:
        """Compile the model. Called after the memory probe, which runs eagerly: it tries sizes that are never timed."""
        if hasattr(torch._dynamo.config, "fail_on_recompile_limit_hit"):
            # Or what has more shapes than torch keeps compiled code for would go on uncompiled, without a word.
            torch._dynamo.config.fail_on_recompile_limit_hit = True
        compile_model(self.model, self.recipe)


def recipe_of(
    spec: JobSpec, configuration: Configuration, dataset: DatasetFacts | None = None, pin_memory: bool = False
) -> Recipe:
    """The configuration as the Recipe that the training code takes; `dataset` is None before the data is read."""
    fields = recipe_fields(
        spec,
        configuration.method,
        configuration.levers,
        configuration.learning_rate,
        configuration.effective_batch_size,
        dataset=dataset,
        pin_memory=pin_memory,
    )
    return Recipe(**{name: _choices(value) for name, value in fields.items()})


def _choices(value: Any) -> Any:
    """A field's value, in which the catalogue's `Applied` is replaced by the training code's `Choice`."""
    if isinstance(value, Applied):
        return Choice(value.lever, value.function, value.options)
    if isinstance(value, tuple):
        return tuple(map(_choices, value))
    return value


def build(
    spec: JobSpec,
    configuration: Configuration,
    device: Device,
    workplace: Workplace,
    seed: int,
    tell: Callable[[ChildMessage], None] = lambda _: None,
    holds_rows: bool = True,
) -> Bundle:
    """Load data and model and make them ready to train; `tell` is told of what only a job's first process does.

    With `holds_rows`, the rows that a run holds and no trial reads take memory here too, where that is the device's.
    TrainingError blames the job where the user made a mistake, and the configuration where another one may work.
    """
    began, is_first = time.perf_counter(), not job_data.is_kept(workplace)
    if is_first:
        tell(Preparing())
    folder = sources.model_folder(spec.model, workplace)
    if is_first and spec.model.weights != "random":
        read_through(folder)
    options = {"trust_remote_code": workplace.allow_remote_code}  # no revision: `folder` is that snapshot
    recipe = replace(recipe_of(spec, configuration), source_options=options)
    config = load_config(folder, options)
    tokenizer = load_tokenizer(folder, recipe)
    data = job_data.load(spec, recipe, tokenizer, workplace)
    if is_first:
        check_padding(getattr(config.get_text_config(), "vocab_size", None), tokenizer)
    seconds = time.perf_counter() - began
    prepare_seconds, data_seconds = (seconds, 0.0) if is_first else (0.0, seconds)
    if is_first:
        tell(Prepared())
    recipe = replace(
        recipe_of(spec, configuration, data.facts, device.can_pin),
        seed=seed,
        source_options=options,
        pickled_weights=workplace.allow_pickle and not any(folder.glob("model*.safetensors")),
    )
    unread = _unread(data, recipe) if holds_rows and not device.has_own_memory else b""
    started = time.perf_counter()
    device.reset_peak()
    model, quantising_seconds = _model(spec, configuration, recipe, folder, tokenizer, data, device, workplace)
    load_peak = device.peak()
    device.synchronize()
    optimizer, scaler = make_optimizer(model, recipe), gradient_scaler(device.torch, recipe)
    load_seconds = time.perf_counter() - started
    check_behaviour(model, data.train, int(tokenizer.pad_token_id), device, recipe)
    return Bundle(
        *(spec, configuration, recipe, device, tokenizer, data, model, optimizer, scaler),
        load_seconds=load_seconds,
        data_seconds=data_seconds,
        prepare_seconds=prepare_seconds,
        model_revision=sources.commit_of(folder),
        quantising_seconds=quantising_seconds,
        load_peak_bytes=load_peak,
        unread=unread,
    )


def _unread(data: job_data.Data, recipe: Recipe) -> bytes:
    """Memory of the size of the rows that no trial reads, which a cap counts; TrainingError where there is too little.

    `bytes` is not touched when it is made, so that it takes none of the machine's; a bytearray would be.
    """
    size = data.unread_bytes(recipe.effective_batch_size)
    try:
        return bytes(size)
    except MemoryError as error:
        rows = data.facts.rows + data.facts.validation_rows
        raise TrainingError(
            f"dataset: its {rows:,} rows take about {size / 2**30:.1f} GiB of the host's memory in the run, more than "
            "there is; take fewer rows, or raise hardware.memory_gib where it is set"
        ) from error


def read_through(folder: Path) -> None:
    """Read a model's weights into the system's file cache, where they fit.

    Else the first trial, which is the baseline's, would be the only one that loads them from a disk or over a network,
    and every other one would be told to be so much faster.
    """
    files = [*folder.glob("*.safetensors")] or [*folder.glob("pytorch_model*.bin")]
    with suppress(OSError):  # what cannot be read is told when the model loads
        if sum(file.stat().st_size for file in files) > CACHED_SHARE * host.memory().available:
            return
        for file in files:
            with file.open("rb", buffering=0) as stream:
                while stream.read(READ_BYTES):
                    pass


def load_config(folder: Path, options: Mapping[str, Any]) -> Any:
    """The model's configuration, which its tokenizer reads too; TrainingError where transformers does not take it."""
    try:
        return AutoConfig.from_pretrained(folder, **options)
    except Exception as error:  # transformers' checks of what a configuration says raise errors of many kinds
        raise TrainingError(f"model.source: its config.json is not one that loads: {told_in_short(error)}") from error


def check_padding(size: int | None, tokenizer: Any) -> None:
    """TrainingError where the tokenizer pads with a token that the model has no embedding for.

    `size` is how many tokens it has embeddings for, None where its configuration does not say.
    """
    if size is not None and tokenizer.pad_token_id >= size:
        raise TrainingError(
            f"model.source: its tokenizer pads with {tokenizer.pad_token!r}, token {tokenizer.pad_token_id}, and the "
            f"model has embeddings for {size} tokens; resize them, or have another token pad, such as the end token"
        )


def load_tokenizer(folder: Path, recipe: Recipe) -> Any:
    """The model's tokenizer, with a padding token; TrainingError when it does not load or has no token to pad with."""
    try:
        return tokenizer_of(folder, recipe)
    except (OSError, ValueError) as error:
        raise TrainingError(f"model.source: its tokenizer does not load: {told_in_short(error)}") from error


def _model(
    spec: JobSpec,
    configuration: Configuration,
    recipe: Recipe,
    folder: Path,
    tokenizer: Any,
    data: job_data.Data,
    device: Device,
    workplace: Workplace,
) -> tuple[Any, float]:
    """(the model, the seconds that quantising it would have taken beyond loading its stored quantised weights)."""
    before_loading(recipe)
    config = model_config(folder, tokenizer, (data.train, data.validation), recipe)
    check_length(spec, config)
    check_attention(configuration.levers["attention"], config, class_of(config, recipe))
    torch.manual_seed(recipe.seed)
    seconds = 0.0
    with loading():
        if recipe.random_weights:
            model = random_model(config, device.torch, recipe)
        elif recipe.quantization:
            model, seconds = quantised.load(folder, config, device.torch, recipe, workplace.quantised_weights)
        else:
            model = loaded_model(folder, config, device.torch, recipe)
    know_padding(model, tokenizer)
    return adapted(model, recipe).train(), seconds


@contextmanager
def loading() -> Iterator[None]:
    """Turn the libraries' loading errors into TrainingErrors that blame the configuration or the model.

    An out-of-memory error passes through, because it says nothing against either.
    """
    try:
        yield
    except (ValueError, ImportError) as error:
        sentence = f"the model does not load this way: {told_in_short(error)}"
        raise TrainingError(sentence, "configuration") from error
    except (OSError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise TrainingError(f"model.source: its weights cannot be read: {told_in_short(error)}") from error
    except RuntimeError as error:
        if "size" not in str(error) or is_out_of_memory(error):
            raise
        raise TrainingError(
            "model.source: some of its weights have other sizes than this task's model needs, as a head has that was "
            "trained for another number of classes; use the checkpoint that it was finetuned from"
        ) from error


def adapted(model: Any, recipe: Recipe) -> Any:
    """The model with its levers and its adapter, by training/model.py; its errors become TrainingErrors."""
    try:
        change_base(model, recipe)
        if recipe.lora is not None:
            model = _with_adapter(model, recipe)
        change_model(model, recipe)
    except (ValueError, ImportError) as error:
        raise TrainingError(
            f"a lever does not work with this model: {told_in_short(error)}", "configuration"
        ) from error
    return model


def _with_adapter(model: Any, recipe: Recipe) -> Any:
    """The model with its LoRA adapter; TrainingError when the model has none of the modules to adapt.

    The configuration is to blame where its lever `adapter` names the modules, and the job where the user names them.
    """
    targets = recipe.lora["target_modules"] if recipe.lora is not None else None
    if isinstance(targets, str) and targets != "all-linear":
        check_pattern(targets, (name for name, _ in model.named_modules()))
    if targets == "all-linear":
        refuse_routers(model)
    try:
        return with_adapter(model, recipe)
    except ValueError as error:
        if recipe.lora is not None and recipe.lora["target_modules"] == list(ATTENTION):
            sentence = f"the lever adapter names modules that this model lacks: {told_in_short(error)}"
            raise TrainingError(sentence, "configuration") from error
        if "lora_dropout" in str(error):
            raise TrainingError(
                f"lora.dropout: this model's adapter cannot drop out; {told_in_short(error)}"
            ) from error
        known = ", ".join(linear_layers(model))
        others = f"; its linear layers are {known}" if known else "; it has no linear layers"
        told = told_in_short(error) + (others if targets == "all-linear" else "")
        raise TrainingError(f"lora.target_modules: {told}") from error


def refuse_routers(model: Any) -> None:
    """TrainingError where a router of experts is a linear layer with more than one output, such as Llama 4's.

    peft's "all-linear" takes it too, and its adapter fails at the first batch, as it expects one tensor.
    """
    linear = [(name.rpartition(".")[2], type(module).__name__) for name, module in model.named_modules()]
    routers = sorted({name for name, kind in linear if kind.endswith("Router")} & set(linear_layers(model)))
    if routers:
        others = ", ".join(name for name in linear_layers(model) if name not in routers)
        raise TrainingError(
            f"lora.target_modules: all-linear takes this model's {routers[0]} of experts as well, which no adapter "
            f"can change; name what to adapt of its other linear layers: {others}"
        )


def unmatched_modules(spec: JobSpec, model: Any) -> list[str]:
    """A note where the job names modules to adapt that the model lacks: peft says nothing if it has some of them."""
    names = spec.lora.target_modules
    if isinstance(names, str) or not hasattr(model, "peft_config"):
        return []
    there = [f".{name}" for name, _ in model.named_modules()]
    missing = [repr(name) for name in names if not any(one.endswith(f".{name}") for one in there)]
    known = ", ".join(linear_layers(model.get_base_model())) or "no linear layers"
    return [f"lora.target_modules: the model has no {' and no '.join(missing)}; it has {known}."] if missing else []


def linear_layers(model: Any) -> list[str]:
    """The names of the model's linear layers but for its output layer, without their places and what adapters add."""
    kinds, last = (torch.nn.Linear, Conv1D), model.get_output_embeddings()  # GPT-2 has its own kind
    linear = (name for name, module in model.named_modules() if isinstance(module, kinds) and module is not last)
    beside = re.compile(r"\.(lora_|modules_to_save\.|original_module)")
    found = (name.removesuffix(".base_layer") for name in linear if not beside.search(name))
    return sorted({name.rpartition(".")[2] for name in found})


def check_length(spec: JobSpec, config: Any) -> None:
    """TrainingError when the job's max_length is more than the positions that the model has.

    RoBERTa and its relatives count theirs from after the padding token's number.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and limit < 1:
        limit = None  # XLNet's -1 says that there is no limit
    if limit is not None and text.model_type in COUNTS_FROM_PADDING:
        limit -= (text.pad_token_id or 0) + 1
    if limit is not None and spec.dataset.max_length > limit:
        raise TrainingError(
            f"dataset.max_length is {spec.dataset.max_length}, but the model has positions for {limit} tokens only"
        )


def parameter_counts(model: Any) -> tuple[int, int]:
    """(all parameters, trained parameters); bitsandbytes stores two 4-bit weights in a byte, which count as two."""
    every = trained = 0
    for parameter in model.parameters():
        count = parameter.numel() * (2 if type(parameter).__name__ == "Params4bit" else 1)
        every += count
        trained += count if parameter.requires_grad else 0
    return every, trained
