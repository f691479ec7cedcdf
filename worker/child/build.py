"""Builds what a trial trains: tokenizer, data, model with its adapter, levers applied, optimizer."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from service.contract.child import Workplace
from service.contract.configuration import Configuration
from service.contract.job import JobSpec
from service.exports.templates.levers.evaluation import Score
from service.exports.templates.segments import offset_positions
from service.levers import LEVERS
from service.levers.adapter import ATTENTION
from service.levers.base import Choice
from service.levers.batching import ROWS
from service.levers.quantization import HEADS
from worker import levers as lever_room
from worker.child import data as data_room
from worker.child import quantised, sources
from worker.child.lacking import WITHOUT_DROPOUT, attention_dropout
from worker.child.problem import JobProblem, TrialProblem
from worker.devices import Device
from worker.devices.base import is_out_of_memory
from worker.levers import batching, precision
from worker.tasks import TASKS, Task


@dataclass
class Bundle:
    """Everything a trial trains with."""

    spec: JobSpec
    configuration: Configuration
    device: Device
    task: Task
    tokenizer: Any
    data: data_room.Data
    model: Any
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    load_seconds: float
    data_seconds: float
    skipped: int = 0
    quantising_seconds: float = 0.0  # what loading would take more where the quantised weights were not kept
    load_peak_bytes: int | None = None

    @property
    def pad(self) -> int:
        """The id that pads."""
        return int(self.tokenizer.pad_token_id)

    def autocast(self) -> Any:
        """The context of forward and loss."""
        return precision.autocast(self.configuration.levers, self.device.torch)

    def new_optimizer(self) -> None:
        """A fresh optimizer: the state that the probe made is dropped."""
        if hasattr(self.optimizer, "release"):
            self.optimizer.release()
        del self.optimizer  # first, or both hold their states
        self.optimizer = _optimizer(self.spec, self.configuration, self.model)

    def rows_are_packed(self) -> bool:
        """Whether samples are packed into rows of max_length; micro batches then count rows."""
        return self.configuration.levers["batching"] in ROWS

    def packed(self) -> bool:
        """Whether rows hold several samples."""
        return batching.is_packed(self.configuration.levers["batching"])

    def width(self, longest: int) -> int:
        """The tokens that rows are padded to."""
        return batching.width(longest, self.configuration.levers["padding"], self.spec.dataset.max_length)

    def compiled(self) -> bool:
        """Whether compile is on."""
        return self.configuration.levers["compile"] != "off"

    def compile(self) -> None:
        """Compile now: after the probe, which runs eagerly so that no batch size is compiled for nothing."""
        lever_room.apply("compiled", self.configuration.levers, self.model)


def build(spec: JobSpec, configuration: Configuration, device: Device, workplace: Workplace, seed: int) -> Bundle:
    """Build it all; JobProblem for the user's mistakes, TrialProblem where only this configuration cannot run."""
    task = TASKS[spec.task]()
    folder = sources.model_folder(spec.model, workplace.roots, workplace.allow_pickle, workplace.allow_remote_code)
    started = time.perf_counter()
    tokenizer = tokenizer_of(folder, workplace)
    source = sources.dataset_path(spec.dataset, workplace.roots)
    data = data_room.load(spec, task, tokenizer, source, workplace.job_cache)
    data_seconds = time.perf_counter() - started
    started = time.perf_counter()
    device.reset_peak()
    model, extra = _model(spec, configuration, task, folder, tokenizer, data, device, workplace, seed)
    load_peak = device.peak()
    model.train()
    device.synchronize()
    scaler = precision.scaler(configuration.levers, device.torch)
    made = _optimizer(spec, configuration, model)
    load_seconds = time.perf_counter() - started
    bundle = Bundle(spec, configuration, device, task, tokenizer, data, model, made, scaler, load_seconds, data_seconds)
    bundle.quantising_seconds, bundle.load_peak_bytes = extra, load_peak
    return bundle


def _optimizer(spec: JobSpec, configuration: Configuration, model: Any) -> torch.optim.Optimizer:
    return lever_room.make_optimizer(
        configuration.levers, model, configuration.learning_rate, spec.training.weight_decay
    )


def evaluating(bundle: Bundle) -> contextlib.AbstractContextManager[Score | None]:
    """The model as the evaluation lever wants it; yields what scores generated completions, if it generates."""
    choice = chosen(bundle.configuration, "evaluation")
    made: contextlib.AbstractContextManager[Score | None] = lever_room.function("evaluation", choice)(
        bundle.model, **choice.options
    )
    return made


def chosen(configuration: Configuration, lever: str) -> Choice:
    """The catalogue's entry of a choice."""
    return LEVERS[lever].choice(configuration.levers[lever])


def load_options(configuration: Configuration) -> dict[str, Any]:
    """What the levers say about loading; transformers raises ValueError when the model has no such attention."""
    attention = chosen(configuration, "attention")
    return {
        "dtype": precision.weights(configuration.levers, configuration.method),
        "attn_implementation": attention.options.get("implementation", attention.name.partition("-")[0]),
    }


def tokenizer_of(folder: Path, workplace: Workplace) -> Any:
    """The model's tokenizer, with something to pad with; JobProblem when it does not load or has nothing."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=workplace.allow_remote_code)
    except (OSError, ValueError) as error:
        raise JobProblem(f"model.source: its tokenizer does not load: {_line(error)}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        raise JobProblem("model.source: its tokenizer has neither a pad nor an end token")
    return tokenizer


def _model(
    spec: JobSpec,
    configuration: Configuration,
    task: Task,
    folder: Path,
    tokenizer: Any,
    data: data_room.Data,
    device: Device,
    workplace: Workplace,
    seed: int,
) -> tuple[Any, float]:
    """The model, and the seconds that quantising it would have taken beyond loading it."""
    from transformers import AutoConfig

    precision.set_matmul(configuration.levers)
    lever_room.apply("load", configuration.levers)
    options = load_options(configuration)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=workplace.allow_remote_code)
    config.use_cache = False
    config.pad_token_id = tokenizer.pad_token_id
    for name, value in task.model_arguments(data.train + data.validation).items():
        setattr(config, name, value)
    check_length(spec, config)
    torch.manual_seed(seed)
    extra = 0.0
    try:
        if spec.model.weights == "random":
            model = _random(spec, configuration, task, config, options, device, seed)
        else:
            options |= {"config": config, "device_map": {"": device.torch}}
            options["trust_remote_code"] = workplace.allow_remote_code
            options["use_safetensors"] = None if workplace.allow_pickle else True
            kind = task.model_class()
            if configuration.method == "qlora":
                rest = f"{spec.task} {seed} {options['dtype']} {task.model_arguments(data.train + data.validation)}"
                asked = quantised.Asked(folder, _quantization(spec.task, configuration), rest)
                model, extra = quantised.load(kind, asked, options, workplace.quantised_weights)
            else:
                model = kind.from_pretrained(folder, **options)
    except (ValueError, ImportError) as error:
        raise TrialProblem(f"the model does not load this way: {_line(error)}") from error
    except (OSError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise JobProblem(f"model.source: its weights cannot be read: {_line(error)}") from error
    except RuntimeError as error:
        if "size" not in str(error) or is_out_of_memory(error):
            raise
        raise JobProblem(f"model.source: its weights do not fit this task's model: {_line(error)}") from error
    _check_attention(configuration, config)
    return adapted(spec, configuration, model, seed), extra


def _check_attention(configuration: Configuration, config: Any) -> None:
    """TrialProblem where the model drops attention weights and the kernel cannot."""
    rate = attention_dropout(config)
    if rate and configuration.levers["attention"] in WITHOUT_DROPOUT:
        raise TrialProblem(
            f"attention={configuration.levers['attention']} has no dropout, and the model's config.json asks for {rate}"
        )


def _random(
    spec: JobSpec,
    configuration: Configuration,
    task: Task,
    config: Any,
    options: dict[str, Any],
    device: Device,
    seed: int,
) -> Any:
    """Drawn weights. Quantised ones are drawn, saved and loaded, so that they take the road real ones take."""
    dtype = torch.float32 if options["dtype"] == "auto" else options["dtype"]
    if configuration.method != "qlora":
        torch.manual_seed(seed)
        # Drawn in fp32 and cast, so that every precision starts from the same weights.
        model = task.model_class().from_config(
            config, dtype=torch.float32, attn_implementation=options["attn_implementation"]
        )
        # Parameters only: buffers such as the rotary frequencies stay fp32, as from_pretrained leaves them.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return model.to(device.torch)
    import tempfile

    torch.manual_seed(seed)
    drawn = task.model_class().from_config(config, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        drawn.save_pretrained(folder)
        del drawn
        return task.model_class().from_pretrained(
            folder,
            config=config,
            quantization_config=_quantization(spec.task, configuration),
            device_map={"": device.torch},
            dtype=dtype,
            attn_implementation=options["attn_implementation"],
        )


def _quantization(task: str, configuration: Configuration) -> Any:
    """The quantised base's arguments."""
    choice, compute = chosen(configuration, "quantization"), precision.autocast_dtype(configuration.levers)
    whole = HEADS if task == "sequence-classification" else None
    return lever_room.function("quantization", choice)(whole, compute or torch.float32, **choice.options)


def adapted(spec: JobSpec, configuration: Configuration, model: Any, seed: int) -> Any:
    """The model with its levers and its adapter, if the method has one."""
    try:
        lever_room.apply("base", configuration.levers, model)
        if configuration.method != "full":
            model = _with_adapter(spec, configuration, model, seed)
        lever_room.apply("model", configuration.levers, model)
        if batching.is_packed(configuration.levers["batching"]):
            offset_positions(model)
    except (ValueError, ImportError) as error:
        raise TrialProblem(f"a lever does not work with this model: {_line(error)}") from error
    return model


def _with_adapter(spec: JobSpec, configuration: Configuration, model: Any, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    kinds = {"causal-lm": "CAUSAL_LM", "sequence-classification": "SEQ_CLS", "masked-lm": None}
    if configuration.method == "qlora":
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    options = dict(chosen(configuration, "adapter").options)
    targets = ATTENTION if options.pop("attention_only", False) else spec.lora.target_modules
    autocast_adapters = options.pop("autocast_adapter_dtype", True)
    config = LoraConfig(
        r=spec.lora.r,
        lora_alpha=spec.lora.alpha,
        lora_dropout=spec.lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type=kinds[spec.task],
        exclude_modules=_trained_whole(spec, model) or None,
        **options,
    )
    torch.manual_seed(seed)  # peft draws the adapter from the global generator
    try:
        adapted = get_peft_model(model, config, autocast_adapter_dtype=autocast_adapters)
    except ValueError as error:
        if targets is ATTENTION:
            raise TrialProblem(f"adapter=attention-only: {_line(error)}") from error
        raise JobProblem(f"lora.target_modules: {_line(error)}") from error
    if precision.autocast_dtype(configuration.levers) and autocast_adapters:
        # peft keeps a classification head in the base's 16 bits; what is trained needs fp32 master weights.
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return adapted


def _trained_whole(spec: JobSpec, model: Any) -> list[str]:
    """Parts of a classifier's head beside `classifier` itself, such as DistilBERT's `pre_classifier`.

    peft trains whatever ends in `classifier` or `score` whole, and fails where `all-linear` has put an adapter there.
    """
    if spec.task != "sequence-classification" or spec.lora.target_modules != "all-linear":
        return []
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return sorted(name for name in names if name.endswith(tuple(HEADS)) and name not in HEADS)


def check_length(spec: JobSpec, config: Any) -> None:
    """JobProblem when samples may be longer than the model has positions for."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
    if spec.dataset.max_length > limit:
        raise JobProblem(
            f"dataset.max_length is {spec.dataset.max_length}, but the model has positions for {limit} tokens only"
        )


def _line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:300]


def parameter_counts(model: Any) -> tuple[int, int]:
    """(all, trained) parameters; 4-bit weights hold two a byte."""
    every = trained = 0
    for parameter in model.parameters():
        count = parameter.numel() * (2 if type(parameter).__name__ == "Params4bit" else 1)
        every += count
        trained += count if parameter.requires_grad else 0
    return every, trained
