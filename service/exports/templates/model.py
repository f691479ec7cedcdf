"""The part of the exported train.py that builds the model and its optimizer."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from service.exports.templates.common import (
    CONFIG,
    Sample,
    autocast_dtype,
    is_classifier,
    is_masked,
    parameter_groups,
)
from service.exports.templates.segments import offset_positions

# ---- model ----


def build_model(folder: Path, tokenizer: Any, samples: list[Sample], device: torch.device, trust: bool) -> Any:
    """The model with precision, attention, quantisation, adapter, checkpointing and compile as measured."""
    method, precision, seed = CONFIG["method"], CONFIG["precision"], CONFIG["training"]["seed"]
    torch.set_float32_matmul_precision(precision.get("matmul", "highest"))
    kind = precision["weights"]
    if method != "full":
        kind = precision.get("adapter_weights", kind)  # frozen weights need no more; trained ones stay fp32
    dtype: Any = kind if kind == "auto" else getattr(torch, kind)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    config.use_cache = False  # with a cache, transformers would not see where packed samples begin
    config.pad_token_id = tokenizer.pad_token_id
    if is_classifier():
        config.num_labels = max(label for _, (label,) in samples) + 1
    options: dict[str, Any] = {"config": config, "attn_implementation": CONFIG["attention"], "dtype": dtype}
    if method == "qlora":
        whole = ["classifier", "score"] if is_classifier() else None  # a head is trained, so it is not quantised
        options["quantization_config"] = quantised_base(whole, autocast_dtype() or torch.float32)
    apply_before_loading()
    torch.manual_seed(seed)
    if CONFIG["model"]["weights"] == "random":
        model = random_model(options, device)
    else:
        model = model_class().from_pretrained(folder, device_map={"": device}, trust_remote_code=trust, **options)
    apply_to_base(model)
    if method != "full":
        model = with_adapter(model)
    apply_to_model(model)
    if CONFIG["packed"]:
        offset_positions(model)
    return model.train()


def apply_before_loading() -> None:
    """The measured levers that must be set before the model is there."""
    assert CONFIG  # LEVERS: load


def apply_to_base(model: Any) -> None:
    """The measured levers that change the model before it gets its adapter."""
    del model  # LEVERS: base


def apply_to_model(model: Any) -> None:
    """The measured levers that change the model with its adapter."""
    del model  # LEVERS: model, compiled


def quantised_base(whole: list[str] | None, compute: torch.dtype) -> Any:
    """The measured format of the frozen base."""
    return whole, compute  # LEVERS: quantised


def model_class() -> Any:
    """The Auto class of the task."""
    import transformers

    if is_masked():
        return transformers.AutoModelForMaskedLM
    return transformers.AutoModelForSequenceClassification if is_classifier() else transformers.AutoModelForCausalLM


def random_model(options: dict[str, Any], device: torch.device) -> Any:
    """Drawn weights, as the job asked for: good for timing, and to train from nothing."""
    options["dtype"] = dtype = torch.float32 if options["dtype"] == "auto" else options["dtype"]
    model = model_class().from_config(
        options["config"], dtype=torch.float32, attn_implementation=options["attn_implementation"]
    )
    if "quantization_config" not in options:
        for parameter in model.parameters():  # not model.to(dtype), which would round the rotary frequencies too
            parameter.data = parameter.data.to(dtype)
        return model.to(device)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return model_class().from_pretrained(folder, device_map={"": device}, **options)


def with_adapter(model: Any) -> Any:
    """LoRA on the frozen model."""
    from peft import LoraConfig, get_peft_model

    model.requires_grad_(False)
    torch.manual_seed(CONFIG["training"]["seed"])  # peft draws the adapter from the global generator
    cast = CONFIG["autocast_adapter_dtype"]
    model = get_peft_model(model, LoraConfig(**CONFIG["lora"]), autocast_adapter_dtype=cast)
    if autocast_dtype() and cast:
        for parameter in model.parameters():  # peft leaves a classifier's head in the base's 16 bits
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return model


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    """The measured optimizer, with the measured learning rate and weight decay."""
    return optimizer_of(parameter_groups(model, CONFIG["training"]["weight_decay"]), CONFIG["learning_rate"])


def optimizer_of(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """The measured optimizer of parameter groups."""
    return torch.optim.AdamW(groups, lr=rate)  # LEVERS: optimizer
