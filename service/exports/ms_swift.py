"""ms-swift's configuration file for `swift sft`."""

from __future__ import annotations

import json
from typing import Any

from service.contract.recommendation import Recommendation
from service.errors import NotYet
from service.exports import hugging_face as hf
from service.exports.base import Export
from service.exports.job_settings import (
    batch,
    data_of,
    hub_configuration,
    lora_targets,
    spec_of,
    trainer_arguments,
    unread,
    was_packed,
    whole,
)
from service.exports.layout import yaml_file
from service.exports.words import Target, Words, alike, cannot, nearest, says
from service.levers.attention import FLASH

LIGER = nearest(hf.ALL_OF_LIGER, use_liger_kernel=True)
BY_LENGTH = nearest(hf.GROUPED_BY_LENGTH, group_by_length=True)
BY_FLASH = cannot("it packs with FlashAttention only")
PACKS = {"packing": True, "padding_free": True, "packing_strategy": "binpack"}
PACKING = nearest(hf.EPOCH_PACKED, **PACKS).only({"attention": FLASH}, BY_FLASH)
PADS = nearest("its collator pads to the longest row of a micro batch")


def four_bits(double: bool) -> dict[str, Any]:
    """The keys of a base of NF4."""
    return {"quant_method": "bnb", "quant_bits": 4, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double}


WORDS: Words = {
    **hf.CODE,
    **hf.FLOAT8,
    "precision": {
        **hf.precision("torch_dtype"),
        "checkpoint": says(torch_dtype=None),
    },
    "attention": hf.attention("attn_impl", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
    "kernels": {
        "off": says(use_liger_kernel=False),
        **alike(LIGER, "liger", "liger-rope", "liger-rms-norm", "liger-swiglu"),
        "hub": cannot("it has no key for transformers' use_kernels"),
    },
    "experts": {
        "as-is": says(experts_impl=None),
        "eager": says(experts_impl="eager"),
        "batched": says(experts_impl="batched_mm"),
        "grouped": says(experts_impl="grouped_mm"),
    },
    "head": {
        "logits": says(use_logits_to_keep=False),
        "chunked": nearest("logits of the learnt positions only, all at once", use_logits_to_keep=True),
        "cut-cross-entropy": nearest("logits of the learnt positions only, all at once", use_logits_to_keep=True),
        "liger": nearest("with all of Liger's other kernels", use_liger_kernel=True),
    },
    "optimizer": hf.optimizers(),
    "checkpointing": {
        "off": says(gradient_checkpointing=False),
        "full": says(**hf.KEPT),
        **alike(nearest(hf.EVERY_LAYER, **hf.KEPT), "every-2", "every-4"),
        "selective": nearest("matmuls and attention are computed again too", **hf.KEPT),
        "offloaded": nearest("layers' inputs stay on the device", **hf.KEPT),
    },
    "compile": hf.COMPILE,
    "batching": {
        "padded": says(packing=False, padding_free=False, group_by_length=False),
        **alike(BY_LENGTH, "sorted", "token-budget", "grouped"),
        "packed": PACKING,
        "padding-free": nearest("micro batches count samples, not tokens", padding_free=True).only(
            {"attention": FLASH}, BY_FLASH
        ),
        "packed-global": says(**PACKS).only({"attention": FLASH}, BY_FLASH),
    },
    "padding": {"longest": says(), **alike(PADS, "multiple-8", "multiple-64", "max")},
    "quantization": {
        "nf4-double": says(**four_bits(True)),
        "nf4": says(**four_bits(False)),
        "int8": says(quant_method="bnb", quant_bits=8),
        **alike(nearest(hf.INT8_INSTEAD, quant_method="bnb", quant_bits=8), "torchao-int8", "torchao-float8"),
    },
    "adapter": {
        "as-asked": says(lora_dtype="float32"),
        "base-dtype": says(lora_dtype="bfloat16").only(
            {"precision": ("bf16-mixed", "bf16-mixed-uncached", "bf16")}, says(lora_dtype="float32")
        ),
        "attention-only": says("by its target modules", lora_dtype="float32"),
        "rslora": says(use_rslora=True, lora_dtype="float32"),
        "dora": says(use_dora=True, lora_dtype="float32"),
    },
    "loading": hf.LOADING,
    "cache": hf.CACHE,
    "evaluation": hf.EVALUATION,
    "allocator": hf.ALLOCATOR,
}
# What ms-swift does where nothing is said: it checkpoints, computes in 16 bits, drops rows that are too long, and has
# Adam average squares with a beta of 0.95.
NEUTRAL: dict[str, Any] = {
    "torch_dtype": "float32",
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "attn_impl": "sdpa",
    "experts_impl": None,
    "use_liger_kernel": False,
    "use_logits_to_keep": False,
    "optim": "adamw_torch_fused",
    "adam_beta2": 0.999,
    "gradient_checkpointing": False,
    "torch_compile": False,
    "torch_compile_backend": None,
    "torch_compile_mode": None,
    "packing": False,
    "padding_free": False,
    "group_by_length": False,
    "quant_method": None,
    "quant_bits": None,
    "lora_dtype": "float32",
    "use_rslora": False,
    "use_dora": False,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": True,
    "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False,
    "torch_empty_cache_steps": None,
    "bf16_full_eval": False,
    "truncation_strategy": "right",
}


def shaped(settings: dict[str, Any]) -> dict[str, Any]:
    """The keys as the file has them: its reader turns null into the text `None`, so that such keys stay unset."""
    return {key: value for key, value in settings.items() if value is not None}


TARGET = Target(
    title="ms-swift",
    package="ms-swift",
    version="4.6.0",
    pins=("transformers<5.20", "peft<0.21", "trl<1.0"),
    run="swift sft ms-swift.yaml",
    neutral=NEUTRAL,
    words=WORDS,
    shaped=shaped,
)
COLUMNS = {"prompt": "query", "completion": "response", "messages": "messages", "text": "response", "tools": "tools"}
# By these names it knows that the input follows the instruction on a line of its own.
WITH_CONTEXT = {"prompt": "instruction", "context": "input", "completion": "output"}


def write(recommendation: Recommendation) -> str:
    """The configuration file; NotYet where this export has nothing for the task."""
    if why := TARGET.refuses(recommendation):
        raise NotYet(why)
    spec, data = spec_of(recommendation), data_of(recommendation)
    settings = TARGET.keys(recommendation)
    arguments = trainer_arguments(
        recommendation, batch(recommendation, packs=settings["packing"] and was_packed(recommendation))
    )
    arguments["warmup_ratio"] = arguments.pop("warmup_steps")
    known = WITH_CONTEXT if "context" in data.columns else COLUMNS
    named = {column: known[kind] for kind, column in data.columns.items() if known[kind] != column}
    job: dict[str, Any] = {
        "model": spec.model.source,
        **({"model_revision": spec.model.revision} if spec.model.revision else {}),
        "use_hf": True,
        "dataset": [":".join(filter(None, (spec.dataset.source, hub_configuration(recommendation))))],
        **({"columns": json.dumps(named)} if named else {}),
        "split_dataset_ratio": spec.dataset.splits.validation_fraction,
        "tuner_type": "lora" if recommendation.LoraConfig else "full",
        "use_chat_template": "messages" in data.columns,
        "loss_scale": "all" if spec.training.loss_on == "all" else "default",
        "max_length": spec.dataset.max_length,
        "output_dir": "output",
        **arguments,
    }
    if settings.get("quant_bits") == 4 and recommendation.BitsAndBytesConfig:  # or fp32 where the weights have fp16
        job["bnb_4bit_compute_dtype"] = recommendation.BitsAndBytesConfig["bnb_4bit_compute_dtype"]
    if recommendation.LoraConfig:
        targets = lora_targets(recommendation)
        job |= {
            "lora_rank": spec.lora.r,
            "lora_alpha": whole(spec.lora.alpha),
            "lora_dropout": spec.lora.dropout,
            **(
                {"target_regex": targets}
                if isinstance(targets, str) and targets != "all-linear"
                else {"target_modules": [targets] if isinstance(targets, str) else targets}
            ),
        }
    return yaml_file(TARGET, recommendation, job, unread(recommendation))


EXPORT = Export("ms-swift", "a configuration file for ms-swift", write, "ms-swift.yaml", "ms-swift", TARGET)
