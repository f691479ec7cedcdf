"""LLaMA-Factory's configuration file for `llamafactory-cli train`, with the entry of its list of datasets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from service.contract.measurement import DatasetFacts
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
from service.exports.layout import commented, yaml_file
from service.exports.words import Target, Word, Words, alike, cannot, nearest, says
from service.levers.attention import FLASH

KEPT: dict[str, Any] = {"disable_gradient_checkpointing": False, "use_reentrant_gc": False}
LIGER = nearest(hf.ALL_OF_LIGER, enable_liger_kernel=True)
OWN_DTYPE = "frozen weights and matmuls have 16 bits where the device has them; only what is trained is in fp32"
BY_LENGTH = nearest(hf.GROUPED_BY_LENGTH, train_sampling_strategy="group_by_length")
THOUSANDS = (
    "samples are packed a thousand at a time, not a step's, so that a step's samples only nearly number the effective "
    "batch"
)
NEAT = nearest(THOUSANDS, packing=True, neat_packing=True)
ONE_ROW = nearest(f"{THOUSANDS}, and a micro batch is one row, as its collator demands", **NEAT.keys)
JOINED = nearest(
    "data with a column of texts are packed as in pretraining, joined a thousand at a time and cut into rows of "
    "cutoff_len, so that texts go on in the next row and attend to those before them in the same row",
    packing=True,
    neat_packing=False,
)
PACKING = JOINED.only({"columns": ("text",)}, ONE_ROW.only({"attention": FLASH}, NEAT))
EIGHT = nearest("its collator always pads to a multiple of 8")


def mixed(flag: str, note: str = "") -> Word:
    """Autocast; LLaMA-Factory itself casts what is trained to fp32."""
    return nearest(note, **{flag: True}) if note else says(**{flag: True})


def four_bits(double: bool) -> Word:
    """A base of NF4."""
    return says(quantization_bit=4, quantization_method="bnb", quantization_type="nf4", double_quantization=double)


WORDS: Words = {
    **hf.CODE,
    "precision": {
        "checkpoint": nearest(OWN_DTYPE),
        "fp32": nearest(OWN_DTYPE),
        "tf32": nearest(OWN_DTYPE, tf32=True),
        "fp32-medium": nearest(OWN_DTYPE, tf32=True),
        "bf16-mixed": mixed("bf16"),
        "bf16-mixed-uncached": mixed("bf16", hf.CAST_KEPT),
        "fp16-mixed": mixed("fp16"),
        "bf16": says(pure_bf16=True),
        "fp16": nearest("a gradient scaler, and fp32 for what is trained", fp16=True),
        "fp64": cannot("it computes in 32 bits at most"),
    },
    "float8": {
        "off": says(fp8=False),
        "tensorwise": nearest("one scale a row, not a tensor", fp8=True, fp8_backend="torchao"),
        "rowwise": says(fp8=True, fp8_backend="torchao"),
        "rowwise-high-precision-gradients": nearest(
            "the gradient of the weights in fp8 too", fp8=True, fp8_backend="torchao"
        ),
    },
    "attention": {
        **hf.attention("flash_attn", "disabled", "sdpa", "fa2", None, None),
        "flash-attention-3": nearest("FlashAttention 2 in place of 3, which its loader refuses", flash_attn="fa2"),
    },
    "kernels": {
        "off": says(enable_liger_kernel=False),
        **alike(LIGER, "liger", "liger-rope", "liger-rms-norm", "liger-swiglu"),
        "hub": cannot("it has no key for transformers' use_kernels"),
    },
    "experts": {
        "as-is": says(),
        **alike(cannot("it has no key for transformers' experts_implementation"), "eager", "batched", "grouped"),
    },
    "head": {
        "logits": says(),
        **alike(cannot("it computes all logits, unless Liger's kernels are on"), "chunked", "cut-cross-entropy"),
        "liger": nearest("with all of Liger's other kernels", enable_liger_kernel=True),
    },
    "optimizer": hf.optimizers(),
    "checkpointing": {
        "off": says(disable_gradient_checkpointing=True),
        "full": says(**KEPT),
        **alike(nearest(hf.EVERY_LAYER, **KEPT), "every-2", "every-4"),
        "selective": nearest("matmuls and attention are computed again too", **KEPT),
        "offloaded": nearest("by its own reentrant function", **KEPT, use_unsloth_gc=True),
    },
    "compile": hf.COMPILE,
    "batching": {
        "padded": says(packing=False, train_sampling_strategy="random"),
        **alike(BY_LENGTH, "sorted", "token-budget", "grouped"),
        **alike(PACKING, "packed", "padding-free", "packed-global"),
    },
    "padding": {
        "longest": EIGHT,
        "multiple-8": says(),
        **alike(EIGHT, "multiple-64", "max"),
    },
    "quantization": {
        "nf4-double": four_bits(True),
        "nf4": four_bits(False),
        "int8": says(quantization_bit=8, quantization_method="bnb"),
        **alike(
            nearest(hf.INT8_INSTEAD, quantization_bit=8, quantization_method="bnb"), "torchao-int8", "torchao-float8"
        ),
    },
    "adapter": {
        "as-asked": says(),
        "base-dtype": cannot("adapters are kept in fp32, unless everything is in bf16"),
        "attention-only": says("by its target modules"),
        "rslora": says(use_rslora=True),
        "dora": says(use_dora=True),
    },
    "loading": hf.LOADING,
    "cache": hf.CACHE,
    "evaluation": hf.EVALUATION,
    "allocator": hf.ALLOCATOR,
}
# What LLaMA-Factory does where nothing is said: reentrant checkpointing of every layer.
NEUTRAL: dict[str, Any] = {
    "bf16": False,
    "fp16": False,
    "pure_bf16": False,
    "tf32": False,
    "fp8": False,
    "flash_attn": "sdpa",
    "enable_liger_kernel": False,
    "use_unsloth": False,
    "use_unsloth_gc": False,
    "optim": "adamw_torch_fused",
    "disable_gradient_checkpointing": True,
    "use_reentrant_gc": False,
    "torch_compile": False,
    "torch_compile_backend": None,
    "torch_compile_mode": None,
    "packing": False,
    "neat_packing": False,
    "train_sampling_strategy": "random",
    "quantization_bit": None,
    "use_rslora": False,
    "use_dora": False,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": True,
    "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False,
    "torch_empty_cache_steps": None,
    "bf16_full_eval": False,
}
TARGET = Target(
    title="LLaMA-Factory",
    package="llamafactory",
    version="0.9.5",
    pins=("transformers<=5.6.0", "peft<=0.18.1", "trl<=0.24.0", "accelerate<=1.11.0"),
    run="llamafactory-cli train llamafactory.yaml",
    neutral=NEUTRAL,
    words=WORDS,
    differs=("warmup_steps as a share, and train_sampling_strategy, need transformers 5.2 or newer",),
)
NAME = "measured"
TAGS = ("role_tag", "content_tag", "user_tag", "assistant_tag", "system_tag")


def write(recommendation: Recommendation) -> str:
    """The configuration file; NotYet where LLaMA-Factory has nothing for the task."""
    if why := TARGET.refuses(recommendation):
        raise NotYet(why)
    spec, data = spec_of(recommendation), data_of(recommendation)
    settings = TARGET.keys(recommendation)
    single = settings["neat_packing"] and settings["flash_attn"] == "fa2"
    size = batch(recommendation, settings["packing"] and was_packed(recommendation), row_by_row=single)
    size = replace(size, evaluation=1) if single else size
    texts, chats = "text" in data.columns, "messages" in data.columns
    job: dict[str, Any] = {
        "model_name_or_path": spec.model.source,
        **({"model_revision": spec.model.revision} if spec.model.revision else {}),
        **({"trust_remote_code": True} if recommendation.evidence.measurement.remote_code else {}),
        "stage": "pt" if texts else "sft",
        "do_train": True,
        "finetuning_type": "lora" if recommendation.LoraConfig else "full",
        "dataset_dir": str(PurePath(spec.dataset.source).parent) if data.is_local else ".",
        "dataset": NAME,
        "template": None if chats else "empty",
        "cutoff_len": spec.dataset.max_length,
        "train_on_prompt": spec.training.loss_on == "all" and not texts,  # of texts everything is learnt
        "val_size": spec.dataset.splits.validation_fraction,
        "output_dir": "output",
        **trainer_arguments(recommendation, size),
    }
    if recommendation.LoraConfig:
        targets = lora_targets(recommendation)
        if isinstance(targets, str) and targets != "all-linear":
            raise NotYet(
                f"LLaMA-Factory takes names of modules, and lora.target_modules is a regular expression ({targets}); "
                "run the job again with a list of names."
            )
        job |= {
            "lora_rank": spec.lora.r,
            "lora_alpha": whole(spec.lora.alpha),
            "lora_dropout": spec.lora.dropout,
            "lora_target": "all" if isinstance(targets, str) else ",".join(targets),
        }
    entry = json.dumps({NAME: dataset(recommendation)}, indent=2)
    told = commented(
        f"Put this into dataset_info.json in the folder {job['dataset_dir']}, or add it to what is there:\n\n{entry}"
    )
    differs = [*unread(recommendation, reads=("split",)), *read_otherwise(data)]
    return yaml_file(TARGET, recommendation, job, differs) + "\n" + told


def read_otherwise(data: DatasetFacts) -> list[str]:
    """Sentences on what LLaMA-Factory makes of the data's rows in another way than the measurement."""
    if "text" in data.columns:
        return [
            "the token that ends a text is not learnt where the tokenizer pads with it, which it does where it has no "
            "padding token of its own"
        ]
    if "messages" not in data.columns:
        return [
            "the template `empty` writes neither the token that begins a text nor the one that ends it, so that the "
            "model does not learn to stop: write the tokenizer's bos_token before every prompt and its eos_token after "
            "every completion in the data first"
        ]
    found = [
        "it reads the form of a turn out of the tokenizer's chat template, and does not start where that refuses "
        "system turns, as Gemma 2's does: name its own template for the model instead, such as template: gemma2",
        "it leaves out conversations in which the turns do not alternate, do not begin with the user or do not end "
        "with the assistant",
    ]
    if "tools" in data.columns:
        found.append(
            "it leaves out conversations with turns of tools, does not read the assistant's calls of tools, and tells "
            "the model of its tools in a form of its own"
        )
        found.append(
            f"the column {data.columns['tools']!r} has to hold JSON as text: write it so first where the data has lists"
        )
    if data.form.sharegpt:
        found.append(
            "it skips conversations in which others than human, gpt and system speak: where your data says user and "
            "assistant, write these as user_tag and assistant_tag in the entry below"
        )
    return found


def dataset(recommendation: Recommendation) -> dict[str, Any]:
    """The entry of dataset_info.json."""
    spec, data = spec_of(recommendation), data_of(recommendation)
    place: dict[str, Any] = (
        {"file_name": PurePath(spec.dataset.source).name}
        if data.is_local
        else {"hf_hub_url": spec.dataset.source, "split": spec.dataset.splits.train}
    )
    if named := hub_configuration(recommendation):
        place["subset"] = named
    if "messages" in data.columns:
        names = ("from", "value", "human", "gpt") if data.form.sharegpt else ("role", "content", "user", "assistant")
        tags = dict(zip(TAGS, (*names, "system"), strict=True))  # all of them: with one, the others have no default
        columns = {kind: column for kind, column in data.columns.items() if kind in ("messages", "tools")}
        return {**place, "formatting": "sharegpt", "columns": columns, "tags": tags}
    if "text" in data.columns:
        return {**place, "columns": {"prompt": data.columns["text"]}}
    more = {"query": data.columns["context"]} if "context" in data.columns else {}  # on a line after the prompt
    return {**place, "columns": {"prompt": data.columns["prompt"], **more, "response": data.columns["completion"]}}


EXPORT = Export(
    "llamafactory", "a configuration file for LLaMA-Factory", write, "llamafactory.yaml", "LLaMA-Factory", TARGET
)
