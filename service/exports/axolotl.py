"""Axolotl's configuration file. Axolotl ignores keys that it does not know, so tests hold each to its schema."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from service.contract.recommendation import Recommendation
from service.errors import NotYet
from service.exports import hugging_face as hf
from service.exports.axolotl_data import about_rows, dataset
from service.exports.base import Export
from service.exports.job_settings import (
    batch,
    lora_targets,
    spec_of,
    unread,
    was_packed,
    whole,
)
from service.exports.layout import yaml_file
from service.exports.words import Target, Word, Words, alike, cannot, nearest, says
from service.levers.attention import FLASH
from service.levers.batching import PACKED
from service.recipe import schedule_of

LIGER = "axolotl.integrations.liger.LigerPlugin"
CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
# A plugin's keys are written where it is named, as without it they are unknown.
KEYS_OF = {
    LIGER: (
        *("liger_rope", "liger_rms_norm", "liger_layer_norm", "liger_glu_activation", "liger_cross_entropy"),
        "liger_fused_linear_cross_entropy",
    ),
    CUT: ("cut_cross_entropy",),
}
EVERY = nearest(hf.EVERY_LAYER, **hf.KEPT)
FP16_WEIGHTS = "full finetuning would load weights in fp16, whose gradients the scaler refuses, so that all is in fp32"
BY_LENGTH = nearest(hf.GROUPED_BY_LENGTH, group_by_length=True)
PACKS = {"sample_packing": True, "eval_sample_packing": False}
EPOCHS = nearest(hf.EPOCH_PACKED, **PACKS)


def bf16_mixed(frozen: Word) -> Word:
    """Autocast; where nothing is frozen the weights themselves have 16 bits."""
    return frozen.only({"method": hf.ADAPTERS}, nearest(hf.HALF_MASTERS, **frozen.keys))


def in_32_bits(word: Word) -> Word:
    """This word, except over an 8-bit base, the rest of which Axolotl loads in fp16 unless bf16 is asked for."""
    rest_in_fp16 = nearest("over a base of 8 bits what is not quantised is loaded in fp16", **word.keys)
    return word.only({"method": ("lora", "full")}, word.only({"quantization": ("nf4-double", "nf4")}, rest_in_fp16))


def liger(*keys: str) -> Word:
    """Liger's kernels by the plugin's keys."""
    return says(plugins={LIGER: True}, **dict.fromkeys(keys, True))


def segments(expandable: str, note: str) -> Word:
    """The caching allocator's setting by both of its names: Axolotl sets the one that is left unset."""
    value = f"expandable_segments:{expandable}"
    return Word("says", note, environment={"PYTORCH_ALLOC_CONF": value, "PYTORCH_CUDA_ALLOC_CONF": value})


def four_bits(double: bool) -> Word:
    """A base of NF4."""
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double}
    return says(load_in_4bit=True, bnb_config_kwargs=options)


def padded_to(multiple: int) -> Word:
    """Rows padded to a multiple. `pad_to_sequence_len` has to be unset: if false, Axolotl pads to the longest row.

    Where Axolotl packs, it sets an unset `pad_to_sequence_len` to true.
    """
    packed = nearest("packed rows are padded to the longest of a micro batch")
    return packed.only({"batching": PACKED}, says(pad_to_sequence_len=None, pad_to_multiple_of=multiple))


CUT_HEAD = says(plugins={CUT: True}, cut_cross_entropy=True)
CUT_BY_PRECISION = CUT_HEAD.only(
    {"precision": ("bf16-mixed", "bf16-mixed-uncached")},
    CUT_HEAD.only(
        {"precision": ("fp16-mixed",), "method": hf.ADAPTERS}, cannot("its plugin is for bf16 and fp16 only")
    ),
)
WORDS: Words = {
    **hf.CODE,
    "precision": {
        "checkpoint": in_32_bits(
            nearest(
                "weights are loaded in fp32; if the checkpoint has bf16, set bfloat16: true instead (under autocast)"
            )
        ),
        "fp32": in_32_bits(says(float32=True)),
        "tf32": in_32_bits(says(float32=True, tf32=True)),
        "fp32-medium": in_32_bits(nearest("TF32 in place of bf16 pieces", float32=True, tf32=True)),
        "bf16-mixed": bf16_mixed(says(bf16=True)),
        "bf16-mixed-uncached": bf16_mixed(nearest(hf.CAST_KEPT, bf16=True)),
        "fp16-mixed": says(fp16=True).only(
            {"method": hf.ADAPTERS},
            cannot(FP16_WEIGHTS, float32=True),
        ),
        "bf16": nearest("under autocast, which computes layer norms and softmax in fp32", bfloat16=True),
        "fp16": says(float16=True),
        "fp64": cannot("it loads weights in 32 bits at most", float32=True),
    },
    "float8": {
        "off": says(fp8=False),
        "tensorwise": says(fp8=True, fp8_config={"recipe": "tensorwise"}),
        "rowwise": says(fp8=True, fp8_config={"recipe": "rowwise"}),
        "rowwise-high-precision-gradients": says(fp8=True, fp8_config={"recipe": "rowwise_with_gw_hp"}),
    },
    "attention": {
        **hf.attention(
            "attn_implementation", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"
        ),
        "varlen": says(attn_implementation="sdpa", sdpa_varlen=True).only(
            {"batching": PACKED},
            nearest(
                "sdpa with a mask, as its variable-length kernel is for packed rows only", attn_implementation="sdpa"
            ),
        ),
    },
    "kernels": {
        "off": says(),
        "liger": liger("liger_rope", "liger_rms_norm", "liger_glu_activation"),
        "liger-rope": liger("liger_rope"),
        "liger-rms-norm": liger("liger_rms_norm"),
        "liger-swiglu": liger("liger_glu_activation"),
        "hub": says(use_kernels=True),
    },
    "experts": {
        "as-is": says(experts_implementation=None),
        "eager": says(experts_implementation="eager"),
        "batched": says(experts_implementation="batched_mm"),
        "grouped": says(experts_implementation="grouped_mm"),
    },
    "head": {
        "logits": says(chunked_cross_entropy=False),
        "chunked": nearest("all logits are computed, and their cross-entropy in chunks", chunked_cross_entropy=True),
        "cut-cross-entropy": CUT_BY_PRECISION,
        "liger": liger("liger_fused_linear_cross_entropy"),
    },
    "optimizer": hf.optimizers(
        "optimizer",
        adamw_torchao_fp8=says(optimizer="ao_adamw_fp8"),
        # It looks for the folder even where torchdistx is installed, and does not start where none is named.
        anyprecision=says(
            **hf.beside_the_name("anyprecision") | {"optimizer": "adamw_anyprecision", "torchdistx_path": "."}
        ),
        galore=nearest(
            "linear layers only are projected, not every matrix",
            **hf.beside_the_name("galore") | {"optimizer": "galore_adamw", "optim_target_modules": "all_linear"},
        ),
    ),
    "checkpointing": {
        "off": says(gradient_checkpointing=False),
        "full": says(**hf.KEPT),
        **alike(EVERY, "every-2", "every-4"),
        "selective": says(
            **hf.KEPT, selective_checkpointing={"save": ["attention", "aten::mm", "aten::addmm", "aten::bmm"]}
        ).only(
            {"method": ("full",)},
            nearest(
                "with adapters it keeps what attention computed, and computes matmuls again",
                **hf.KEPT,
                selective_checkpointing={"save": ["attention"]},
            ),
        ),
        "offloaded": says(**hf.KEPT, activation_offloading="hidden_states"),
    },
    "compile": {
        **hf.COMPILE,
        "whole-max-autotune": replace(
            nearest(f"with CUDA graphs: {hf.NO_ACCUMULATION}", torch_compile=True, torch_compile_mode="max-autotune"),
            environment=hf.INDUCTOR,
        ),
    },
    "batching": {
        "padded": says(sample_packing=False, batch_flattening=False, group_by_length=False),
        **alike(BY_LENGTH, "sorted", "token-budget", "grouped"),
        "packed": EPOCHS,
        "padding-free": nearest("micro batches count samples, not tokens", batch_flattening=True).only(
            {"attention": FLASH}, EPOCHS
        ),
        "packed-global": says(**PACKS),
    },
    "padding": {
        "longest": says(pad_to_sequence_len=False),
        "multiple-8": padded_to(8),
        "multiple-64": padded_to(64),
        "max": says(pad_to_sequence_len=True, pad_to_multiple_of=1),  # unset, the multiple is 64
    },
    "quantization": {
        "nf4-double": four_bits(True),
        "nf4": four_bits(False),
        "int8": says(load_in_8bit=True),
        **alike(nearest(hf.INT8_INSTEAD, load_in_8bit=True), "torchao-int8", "torchao-float8"),
    },
    "adapter": {
        "as-asked": says(),
        "base-dtype": says(peft_autocast_adapter_dtype=False),
        "attention-only": says("by its target modules"),
        "rslora": says(peft_use_rslora=True),
        "dora": says(peft_use_dora=True),
    },
    "projections": {
        "peft": says(lora_mlp_kernel=False, lora_qkv_kernel=False, lora_o_kernel=False),
        "without-cast": cannot("it has no such change to peft's layers"),
        "fused": nearest(
            "Axolotl's own autograd functions and Triton kernels for LoRA",
            lora_mlp_kernel=True,
            lora_qkv_kernel=True,
            lora_o_kernel=True,
        ).only(
            {"dropout": ("off",), "remote_code": ("off",)},
            cannot("its LoRA kernels have no dropout, and are not for models that bring their own code"),
        ),
    },
    "loading": {
        **hf.LOADING,
        **{
            f"workers-{count}": nearest(
                "its workers end with each epoch", dataloader_num_workers=count, dataloader_prefetch_factor=2
            )
            for count in (2, 4)
        },
    },
    "cache": hf.CACHE,
    "evaluation": {**hf.EVALUATION, "loss-16bit": nearest("it evaluates in the training's own precision")},
    "allocator": {
        "default": segments("False", "in the environment, as it would turn expandable segments on"),
        "expandable": segments("True", "in the environment of the command"),
    },
}
# What Axolotl does where nothing is said: bf16 and tf32 by the device, and rows that are too long are dropped, as is an
# evaluation's last batch where it packs.
NEUTRAL: dict[str, Any] = {
    "bf16": False,
    "fp16": False,
    "bfloat16": False,
    "float16": False,
    "float32": False,
    "tf32": False,
    "fp8": False,
    "attn_implementation": "sdpa",
    "sdpa_varlen": False,
    "plugins": {},
    **{key: False for keys in KEYS_OF.values() for key in keys},
    "chunked_cross_entropy": False,
    "use_kernels": False,
    "experts_implementation": None,
    "optimizer": "adamw_torch_fused",
    "gradient_checkpointing": False,
    "selective_checkpointing": None,
    "activation_offloading": False,
    "torch_compile": False,
    "torch_compile_backend": None,
    "torch_compile_mode": None,
    "sample_packing": False,
    "eval_sample_packing": False,
    "batch_flattening": False,
    "group_by_length": False,
    "pad_to_sequence_len": False,
    "pad_to_multiple_of": None,
    "dataloader_drop_last": False,
    "load_in_4bit": False,
    "load_in_8bit": False,
    "peft_autocast_adapter_dtype": None,
    "peft_use_rslora": False,
    "peft_use_dora": False,
    "lora_mlp_kernel": False,
    "lora_qkv_kernel": False,
    "lora_o_kernel": False,
    "lora_embedding_kernel": False,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": True,
    "dataloader_prefetch_factor": None,
    "torch_empty_cache_steps": None,
    "excess_length_strategy": "truncate",
}


def shaped(settings: dict[str, Any]) -> dict[str, Any]:
    """The keys as the file has them: plugins as a list, their keys only where they are named."""
    plugins = list(settings.get("plugins", {}))
    unknown = {key for plugin, keys in KEYS_OF.items() if plugin not in plugins for key in keys}
    found = {key: value for key, value in settings.items() if key not in unknown}
    return found | {"plugins": plugins} if plugins else {key: value for key, value in found.items() if key != "plugins"}


TARGET = Target(
    title="Axolotl",
    package="axolotl",
    version="0.19.0",
    pins=("torch>=2.11,<=2.13", "transformers==5.16.1", "peft==0.20.0", "trl==1.9.0", "accelerate==1.13.0"),
    run="axolotl train axolotl.yaml",
    neutral=NEUTRAL,
    words=WORDS,
    shaped=shaped,
    differs=(
        "its warm-up takes the whole steps of the share, rounded down, and two where that is one",
        "it evaluates before the first step, too",
    ),
)


def write(recommendation: Recommendation) -> str:
    """The configuration file; NotYet where Axolotl has nothing for the task."""
    if why := TARGET.refuses(recommendation):
        raise NotYet(why)
    spec = spec_of(recommendation)
    size, training = batch(recommendation, packs=was_packed(recommendation)), spec.training
    job: dict[str, Any] = {
        "base_model": spec.model.source,
        **({"revision_of_model": spec.model.revision} if spec.model.revision else {}),
        **({"trust_remote_code": True} if recommendation.evidence.measurement.remote_code else {}),
        "datasets": [dataset(recommendation)],
        "val_set_size": spec.dataset.splits.validation_fraction,
        "output_dir": "./output",
        "sequence_len": spec.dataset.max_length,
        "train_on_inputs": training.loss_on == "all",
        "micro_batch_size": size.micro,
        "gradient_accumulation_steps": size.accumulation,
        "eval_batch_size": size.evaluation,
        "num_epochs": training.epochs,
        "learning_rate": recommendation.configuration.learning_rate,
        "lr_scheduler": schedule_of(training),
        "warmup_ratio": training.warmup_ratio,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "seed": training.seed,
        **({"eval_steps": training.evaluation_steps} if training.evaluation_steps else {"eval_strategy": "epoch"}),
        "logging_steps": 10,
    }
    settings = TARGET.keys(recommendation)
    if recommendation.LoraConfig:
        targets = lora_targets(recommendation)
        job |= {
            "adapter": "qlora" if settings["load_in_4bit"] else "lora",
            "lora_r": spec.lora.r,
            "lora_alpha": whole(spec.lora.alpha),
            "lora_dropout": spec.lora.dropout,
            **({"lora_target_linear": True} if targets == "all-linear" else {"lora_target_modules": targets}),
        }
    told = [*unread(recommendation, reads=("split", "revision", "template")), *about_rows(recommendation)]
    if size.accumulation > 1:
        told.append(
            "a step's loss is the mean of its micro batches' means, not the mean over its tokens: a token counts for "
            "more where fewer others of its micro batch are learnt"
        )
    return yaml_file(TARGET, recommendation, job, told)


EXPORT = Export("axolotl", "a configuration file for Axolotl", write, "axolotl.yaml", "Axolotl", TARGET)
