"""The part of the exported train.py that builds the model and its optimizer."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, BitsAndBytesConfig

from service.exports.templates.common import AUTOCAST, CONFIG, Sample, is_classifier, lever

# ---- model ----


def build_model(folder: Path, tokenizer: Any, samples: list[Sample], device: torch.device, trust: bool) -> Any:
    """The model with precision, attention, quantisation, adapter, checkpointing and compile as measured."""
    method, precision, seed = CONFIG["method"], lever("precision"), CONFIG["training"]["seed"]
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    dtype: Any = "auto" if precision == "checkpoint" else torch.float32
    if precision in AUTOCAST and method != "full":
        dtype = AUTOCAST[precision]  # frozen weights need no more; trained ones stay fp32
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    config.use_cache = False  # with a cache, transformers would not see where packed samples begin
    config.pad_token_id = tokenizer.pad_token_id
    if is_classifier():
        config.num_labels = max(label for _, (label,) in samples) + 1
    options: dict[str, Any] = {"config": config, "attn_implementation": lever("attention"), "dtype": dtype}
    if method == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            # A classification head is trained, so it is not quantised.
            llm_int8_skip_modules=["classifier", "score"] if is_classifier() else None,
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=AUTOCAST.get(precision, torch.float32),
        )
    torch.manual_seed(seed)
    if CONFIG["model"]["weights"] == "random":
        model = random_model(options, device)
    else:
        model = model_class().from_pretrained(folder, device_map={"": device}, trust_remote_code=trust, **options)
    if method != "full":
        model = with_adapter(model)
    if lever("checkpointing") == "full":
        # Its old name from transformers before 5.23 is gradient_checkpointing_enable.
        name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
        getattr(model, f"{name}_checkpointing_enable")(**{f"{name}_checkpointing_kwargs": {"use_reentrant": False}})
        if method != "full":
            model.enable_input_require_grads()  # or no gradient would reach the adapters through frozen layers
    if lever("compile") == "per-layer":  # the whole model at once would build sdpa's dense mask
        lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
        for layer in max(lists, key=len, default=()):
            layer.compile(dynamic=True)
    return model.train()


def model_class() -> Any:
    """The Auto class of the task."""
    import transformers

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
    model = get_peft_model(model, LoraConfig(**CONFIG["lora"]))
    if lever("precision") in AUTOCAST:
        for parameter in model.parameters():  # peft leaves a classifier's head in the base's 16 bits
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return model


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    """The measured AdamW; weight decay on matrices, not on biases and norms."""
    choice, rate = lever("optimizer"), CONFIG["learning_rate"]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [one for one in trained if one.ndim >= 2], "weight_decay": CONFIG["training"]["weight_decay"]},
        {"params": [one for one in trained if one.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    kinds = {
        "adamw-loop": {"foreach": False, "fused": False},
        "adamw-foreach": {"foreach": True},
        "adamw-fused": {"fused": True},
    }
    if choice in kinds:
        return torch.optim.AdamW(groups, lr=rate, **kinds[choice])
    import bitsandbytes as bnb

    eight_bit: Any = {"adamw-8bit": bnb.optim.AdamW8bit, "paged-adamw-8bit": bnb.optim.PagedAdamW8bit}[choice]
    made: torch.optim.Optimizer = eight_bit(groups, lr=rate)
    return made
