"""TRL's configuration file for `trl sft --config`: fields of SFTConfig, ModelConfig and DatasetMixtureConfig."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from service.contract.measurement import DatasetFacts
from service.contract.recommendation import Recommendation
from service.errors import NotYet
from service.exports import hugging_face as hf
from service.exports.base import Export
from service.exports.job_settings import (
    Batch,
    batch,
    data_of,
    hub_configuration,
    loader,
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

# The figure is of `python -m benchmarks.export_speed` at commit b13c83d, where TRL's script had TRL's own loss.
FUSED_HEAD = nearest(
    "TRL computes every loss with a fused output layer of its own, which never holds all logits, and entropy and "
    "accuracy beside it (on a CPU, a model of 13 million parameters trained with TRL at 0.55 of its speed)"
)
BF16_ADAPTERS = nearest("TRL casts the adapters of a quantised base to bf16")
EPOCHS = nearest(hf.EPOCH_PACKED, packing=True, packing_strategy="bfd")
ROW_BY_ROW = nearest(
    "an epoch's samples are packed, not a step's, and a micro batch is one row: TRL lays rows side by side, and the "
    "mask of this attention grows with the square of what is side by side",
    packing=True,
    packing_strategy="bfd",
)
BY_LENGTH = nearest(hf.GROUPED_BY_LENGTH, train_sampling_strategy="group_by_length")
PACKING = EPOCHS.only({"attention": FLASH}, ROW_BY_ROW)
ATTENTION = hf.attention(
    "attn_implementation", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"
)
PRECISION = hf.precision("dtype")
SHARED: Words = {
    **hf.CODE,
    **hf.FLOAT8,
    "attention": ATTENTION,
    "kernels": {
        "off": says(use_liger_kernel=False),
        **hf.LIGER,
        "hub": says(model_init_kwargs={"use_kernels": True}),
    },
    "head": {
        "logits": FUSED_HEAD,
        "chunked": says("by TRL's own fused output layer"),
        **alike(FUSED_HEAD, "cut-cross-entropy", "liger"),
    },
    "optimizer": hf.optimizers(),
    "checkpointing": {
        "off": says(activation_checkpointing=False),
        "full": hf.checkpointed(),
        "every-2": hf.checkpointed(every_n_layers=2),
        "every-4": hf.checkpointed(every_n_layers=4),
        "selective": nearest(
            "it keeps what attention computed, and computes matmuls again", **hf.checkpointed(selective=True).keys
        ),
        "offloaded": nearest("it computes nothing while it copies", **hf.checkpointed(offload=True).keys),
    },
    "padding": {
        "longest": says(pad_to_multiple_of=None),
        "multiple-8": says(pad_to_multiple_of=8),
        "multiple-64": says(pad_to_multiple_of=64),
        "max": cannot("its collator pads to the longest row of a micro batch or to a multiple"),
    },
    "compile": hf.COMPILE,
    "loading": hf.LOADING,
    "cache": hf.CACHE,
    "evaluation": hf.EVALUATION,
    "allocator": hf.ALLOCATOR,
}
WORDS: Words = {
    **SHARED,
    "precision": PRECISION,
    "experts": {
        "as-is": says(),
        "eager": says(model_init_kwargs={"experts_implementation": "eager"}),
        "batched": says(model_init_kwargs={"experts_implementation": "batched_mm"}),
        "grouped": says(model_init_kwargs={"experts_implementation": "grouped_mm"}),
    },
    "batching": {
        "padded": says(packing=False, padding_free=False, train_sampling_strategy="random"),
        **alike(BY_LENGTH, "sorted", "token-budget", "grouped"),
        **alike(PACKING, "packed", "padding-free"),
        "packed-global": says(packing=True, packing_strategy="bfd").only({"attention": FLASH}, ROW_BY_ROW),
    },
    "quantization": {
        "nf4-double": says(load_in_4bit=True, bnb_4bit_quant_type="nf4", use_bnb_nested_quant=True),
        "nf4": says(load_in_4bit=True, bnb_4bit_quant_type="nf4", use_bnb_nested_quant=False),
        "int8": says(load_in_8bit=True),
        **alike(nearest(hf.INT8_INSTEAD, load_in_8bit=True), "torchao-int8", "torchao-float8"),
    },
    "adapter": {
        "as-asked": says().only({"method": ("lora", "full")}, BF16_ADAPTERS),
        "base-dtype": cannot("it has no key for peft's autocast_adapter_dtype, so that adapters are kept in fp32"),
        "attention-only": says("by its target modules").only({"method": ("lora", "full")}, BF16_ADAPTERS),
        "rslora": says(use_rslora=True),
        "dora": says(use_dora=True),
    },
}
# What TRL does where nothing is said: it checkpoints, computes in bf16, cuts at 1,024 tokens, and adds the loss that
# balances routers of experts.
NEUTRAL: dict[str, Any] = {
    "dtype": "float32",
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "attn_implementation": "sdpa",
    "model_init_kwargs": None,
    "load_in_4bit": False,
    "load_in_8bit": False,
    "use_rslora": False,
    "use_dora": False,
    "activation_checkpointing": False,
    "activation_checkpointing_kwargs": None,
    "activation_offloading": False,
    "use_liger_kernel": False,
    "liger_kernel_config": None,
    "loss_type": "nll",
    "router_aux_loss_coef": 0.0,
    "torch_compile": False,
    "torch_compile_backend": None,
    "torch_compile_mode": None,
    "optim": "adamw_torch_fused",
    "packing": False,
    "padding_free": False,
    "pad_to_multiple_of": None,
    "train_sampling_strategy": "random",
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": True,
    "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False,
    "torch_empty_cache_steps": None,
    "bf16_full_eval": False,
}
TARGET = Target(
    title="TRL's command line",
    package="trl",
    version="1.16.0",
    pins=("transformers>=4.56.2", "accelerate>=1.10.1", "datasets>=4.7.0"),
    run="trl sft --config trl.yaml",
    neutral=NEUTRAL,
    words=WORDS,
    differs=("activation_checkpointing needs transformers 5.23 or newer",),
)


def size_of(recommendation: Recommendation) -> Batch:
    """Micro batches of samples, or of packed rows: one row at a time where attention has a mask, also in evaluations.

    TRL lays the packed rows of a batch side by side there, too.
    """
    packed, masked = was_packed(recommendation), recommendation.configuration.levers["attention"] not in FLASH
    size = batch(recommendation, packed, row_by_row=masked)
    return replace(size, evaluation=1) if packed and masked else size


def write(recommendation: Recommendation) -> str:
    """The configuration file; NotYet where TRL has nothing for the task."""
    if why := TARGET.refuses(recommendation):
        raise NotYet(why)
    spec, data = spec_of(recommendation), data_of(recommendation)
    learns_all = spec.training.loss_on == "all"
    job: dict[str, Any] = {
        "model_name_or_path": spec.model.source,
        **({"model_revision": spec.model.revision} if spec.model.revision else {}),
        **({"trust_remote_code": True} if recommendation.evidence.measurement.remote_code else {}),
        "datasets": [dataset(recommendation)],
        "test_split_size": spec.dataset.splits.validation_fraction,
        "output_dir": "output",
        "max_length": spec.dataset.max_length,
        "dataset_text_field": columns_of(data)[0] if "text" in data.columns else "text",
        "completion_only_loss": "completion" in data.columns and not learns_all,
        "assistant_only_loss": "messages" in data.columns and not learns_all,
        **trainer_arguments(recommendation, size_of(recommendation)),
    }
    if recommendation.LoraConfig:
        targets = lora_targets(recommendation)
        job |= {
            "use_peft": True,
            "lora_r": spec.lora.r,
            "lora_alpha": whole(spec.lora.alpha),
            "lora_dropout": spec.lora.dropout,
            "lora_target_modules": [targets] if isinstance(targets, str) else targets,
        }
    names = () if data.form.sharegpt else columns_of(data)
    told = [*unread(recommendation, *names, reads=("split",)), *about_rows(recommendation)]
    return yaml_file(TARGET, recommendation, job, told)


def columns_of(data: DatasetFacts) -> tuple[str, ...]:
    """The columns that TRL is to read, by the names that it wants: it takes `prompt` for the start of a completion."""
    text = data.columns.get("text")
    return (text,) if text and text != "prompt" else tuple(kind for kind in data.columns if kind != "context")


def dataset(recommendation: Recommendation) -> dict[str, Any]:
    """Where the data is, and which of its columns are read: TRL guesses the form of a row from all that it has."""
    spec, data = spec_of(recommendation), data_of(recommendation)
    source = spec.dataset.source
    place = {"path": loader(data), "data_files": source} if data.is_local and not data.is_folder else {"path": source}
    split = "train" if data.is_local else spec.dataset.splits.train
    name = {"name": named} if (named := hub_configuration(recommendation)) else {}
    return {**place, **name, "split": split, "columns": list(columns_of(data))}


def about_rows(recommendation: Recommendation) -> list[str]:
    """Sentences on what has to be done to the data before TRL can train on them as they were measured."""
    data = data_of(recommendation)
    found: list[str] = []
    if context := data.columns.get("context"):
        found.append(f"the column {context!r} is not read: write it behind the prompts, on a line of its own, first")
    if "messages" not in data.columns:
        return found
    if data.form.sharegpt:
        found.append(
            "conversations in ShareGPT's form cannot be trained on: write them to a column 'messages' first, whose "
            "turns have `role` (user, assistant or system) and `content` in place of `from` (human, gpt or system) "
            "and `value`"
        )
    if spec_of(recommendation).training.loss_on == "completion":
        found.append(
            "the chat template has to mark what the assistant says, as only that is learnt: TRL does not start with a "
            "template without {% generation %} and {% endgeneration %}, unless it is one of those that TRL completes "
            "itself. Put the marks around the assistant's words and the token that ends them, write the template to a "
            "file, and add the line chat_template_path: FILE.jinja"
        )
    return found


EXPORT = Export("trl.yaml", "a configuration file for `trl sft`", write, "trl.yaml", "TRL's command line", TARGET)
