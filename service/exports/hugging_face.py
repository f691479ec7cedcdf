"""Words shared by trainers that use transformers' Trainer, and words for what no configuration file can say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from service.exports.words import Word, Words, alike, cannot, nearest, says
from service.levers import LEVERS, checkpointing

ADAPTERS = ("lora", "qlora")
# Sentences on what several trainers do in another way.
CAST_KEPT = "autocast keeps the weights that it has cast, which takes memory"
HALF_MASTERS = "full finetuning keeps its weights in 16 bits, without fp32 master weights"
ALL_OF_LIGER = "all kernels that Liger has for the model, the fused cross-entropy among them"
EVERY_LAYER = "every layer is checkpointed, not every second or fourth"
GROUPED_BY_LENGTH = "samples are grouped by length over 50 batches, which changes their order"
EPOCH_PACKED = (
    "an epoch's samples are packed, not a step's, so that a step's samples only nearly number the effective batch"
)
INT8_INSTEAD = "bitsandbytes' int8 in place of torchao's formats"

FOREACH = "torch chooses foreach or a loop by itself, by the device"
IN_32_BITS = "the 8-bit states of trained embeddings are kept in 32 bits"
# Choice of the lever `optimizer` -> (transformers' name of it or of the nearest, in what that differs).
OPTIMIZERS: dict[str, tuple[str, str]] = {
    "adamw-loop": ("adamw_torch", FOREACH),
    "adamw-foreach": ("adamw_torch", FOREACH),
    "adamw-fused": ("adamw_torch_fused", ""),
    "adamw-offloaded": ("paged_adamw_32bit", "states page to the host when the device is full, and are not kept there"),
    "adamw-in-backward": ("adamw_torch_fused", "all gradients exist at once, as it steps after the backward pass"),
    "adamw-8bit": ("adamw_bnb_8bit", IN_32_BITS),
    "adamw-8bit-stable-embedding": ("adamw_bnb_8bit", ""),
    "paged-adamw-8bit": ("paged_adamw_8bit", IN_32_BITS),
    "adamw-bnb-32bit": ("paged_adamw_32bit", "bitsandbytes' 32-bit AdamW is there in its paged form only"),
    "paged-adamw-32bit": ("paged_adamw_32bit", ""),
    "adamw-torchao-8bit": ("adamw_torch_8bit", ""),
    "adamw-torchao-4bit": ("adamw_torch_4bit", ""),
    "adamw-torchao-fp8": ("adamw_torch_8bit", "8-bit integers in place of 8-bit floats"),
    "adamw-stochastic-rounding": (
        "adamw_torch_fused",
        "updates of bf16 weights are rounded to the nearest, and small ones lost",
    ),
    "apex-fused-adam": ("adamw_torch_fused", "torch's fused kernel in place of Apex's"),
    "anyprecision": ("adamw_anyprecision", ""),
    "adafactor": ("adafactor", ""),
    "lion": ("lion_32bit", ""),
    "galore": ("galore_adamw", "linear layers only are projected, not every matrix"),
    "sgd": ("sgd", ""),
}


def beside_the_name(choice: str) -> dict[str, Any]:
    """The TrainingArguments of an optimizer besides its name."""
    arguments = LEVERS["optimizer"].choice(choice).training_arguments
    return {name: value for name, value in arguments.items() if name != "optim"}


def optimizers(key: str = "optim", **better: Word) -> dict[str, Word]:
    """A word for each optimizer under a target's key; `better` replaces words (with _ for - in the choice)."""
    found = {}
    for choice, (name, note) in OPTIMIZERS.items():
        keys = {key: name, **beside_the_name(choice)}
        found[choice] = nearest(note, **keys) if note else says(**keys)
    return found | {choice.replace("_", "-"): word for choice, word in better.items()}


# Non-reentrant checkpointing by its older names, which trainers with keys of their own still have.
KEPT: dict[str, Any] = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


def checkpointed(**options: Any) -> Word:
    """Non-reentrant checkpointing with these options."""
    return says(**checkpointing.kept(**options))


LIGER = {
    choice.name: says(**choice.training_arguments)
    for choice in LEVERS["kernels"].choices
    if "use_liger_kernel" in choice.training_arguments
}
WHOLE_ONLY = "it compiles the whole model or nothing; whole graphs break at adapters, checkpoints and packed rows"
NO_ACCUMULATION = (
    "gradients lie in the graphs' memory, so that it fails with more than one micro batch a step (pytorch issue 169545)"
)
# As training/levers/compile.py has it: inductor computes wrong gradients of chained norms (pytorch issue 193061).
INDUCTOR = {"TORCHINDUCTOR_MIX_ORDER_REDUCTION": "0"}
FOR_EACH_SHAPE = "it compiles for each shape at first, where train.py compiles once for all shapes"
COMPILE = {
    "off": says(torch_compile=False),
    **alike(cannot(WHOLE_ONLY), "per-layer", "per-layer-max-autotune", "per-layer-aot-eager"),
    "whole": replace(nearest(FOR_EACH_SHAPE, torch_compile=True), environment=INDUCTOR),
    "whole-reduce-overhead": replace(
        nearest(NO_ACCUMULATION, torch_compile=True, torch_compile_mode="reduce-overhead"), environment=INDUCTOR
    ),
    "whole-max-autotune": replace(
        nearest(FOR_EACH_SHAPE, torch_compile=True, torch_compile_mode="max-autotune-no-cudagraphs"),
        environment=INDUCTOR,
    ),
    "whole-cudagraphs": nearest(NO_ACCUMULATION, torch_compile=True, torch_compile_backend="cudagraphs"),
}
LOADING = {
    "ahead": nearest(
        "batches are made when they are asked for, not while the device computes",
        dataloader_num_workers=0,
        dataloader_pin_memory=True,
    ),
    "unpinned": nearest(
        "batches are made when they are asked for, not while the device computes",
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
    ),
    "workers-2": says(dataloader_num_workers=2, dataloader_prefetch_factor=2, dataloader_persistent_workers=True),
    "workers-4": says(dataloader_num_workers=4, dataloader_prefetch_factor=2, dataloader_persistent_workers=True),
}
CACHE = {
    "kept": says(torch_empty_cache_steps=None),
    "emptied": nearest(
        "it is emptied in every micro batch, before the backward pass, and not once a step", torch_empty_cache_steps=1
    ),
}
EVALUATION = {
    "loss": says(),
    "loss-16bit": nearest("it evaluates in 16 bits outside of training only", bf16_full_eval=True),
    "generation": cannot("its evaluation computes losses and generates nothing that BLEU and ROUGE could be taken of"),
}
ALLOCATOR = {
    "default": says(),
    "expandable": Word(
        "says",
        "in the environment of the command",
        environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    ),
}
BACKENDS = "torch chooses sdpa's kernel by itself"


def attention(
    key: str, eager: str, sdpa: str, flash_2: str | None, flash_3: str | None, flex: str | None
) -> dict[str, Word]:
    """The words of the lever `attention` under a target's key, by its names for the kernels; None: it has none."""

    def named(name: str | None, instead: str) -> Word:
        return says(**{key: name}) if name else nearest(instead, **{key: sdpa})

    backend = nearest(BACKENDS, **{key: sdpa})
    return {
        "eager": says(**{key: eager}),
        "sdpa": says(**{key: sdpa}),
        **alike(backend, "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-math"),
        "flex": named(flex, "sdpa in place of flex_attention"),
        "varlen": nearest("sdpa with a mask, in place of a kernel that is told where samples end", **{key: sdpa}),
        "flash-attention-2": named(flash_2, "sdpa in place of FlashAttention 2"),
        "flash-attention-3": named(flash_3, "sdpa in place of FlashAttention 3"),
    }


MODEL_CODE = "it changes how the model computes, which no configuration file can"
# What is Python in train.py and in the script for Trainer, and has no key anywhere else.
CODE: Words = {
    "activations": {
        "all": says(),
        **alike(
            cannot("the compiler's activation budget is a setting of torch's that it does not pass on"), "half", "fifth"
        ),
    },
    "normalisation": {"as-is": says(), **alike(cannot(MODEL_CODE), "low-precision", "apex-fused")},
    "vocabulary": {"as-is": says(), **alike(cannot(MODEL_CODE), "multiple-8", "multiple-64")},
    "projections": {"peft": says(), **alike(cannot(MODEL_CODE), "without-cast", "fused")},
}
NO_FLOAT8 = cannot("it has no fp8 matmuls for training")
FLOAT8: Words = {
    "float8": {"off": says(), **alike(NO_FLOAT8, "tensorwise", "rowwise", "rowwise-high-precision-gradients")}
}


def precision(key: str) -> dict[str, Word]:
    """The words of the lever `precision` where weights are loaded in the dtype under `key`, and flags say the rest."""

    def mixed(flag: str, dtype: str, note: str = "") -> Word:
        frozen, trained = {key: dtype, flag: True}, {key: "float32", flag: True}
        words = [nearest(note, **keys) if note else says(**keys) for keys in (frozen, trained)]
        return words[0].only({"method": ADAPTERS}, words[1])

    # A trainer that quantises computes in this dtype, and `auto` is none.
    own = says(**{key: "float32"})
    for dtype in ("float16", "bfloat16"):
        own = says(**{key: dtype}).only({"weights": (dtype,)}, own)
    return {
        "checkpoint": says(**{key: "auto"}).only({"method": ("lora", "full")}, own),
        "fp32": says(**{key: "float32"}),
        "tf32": says(**{key: "float32", "tf32": True}),
        "fp32-medium": nearest("TF32 in place of bf16 pieces", **{key: "float32", "tf32": True}),
        "bf16-mixed": mixed("bf16", "bfloat16"),
        "bf16-mixed-uncached": mixed("bf16", "bfloat16", CAST_KEPT),
        "fp16-mixed": mixed("fp16", "float16"),
        "bf16": says(**{key: "bfloat16"}),
        "fp16": says(**{key: "float16"}),
        "fp64": cannot("it loads weights in 32 bits at most", **{key: "float32"}),
    }
