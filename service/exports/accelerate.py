"""accelerate's configuration file, for `accelerate launch`: where a script runs, and in which precision."""

from __future__ import annotations

from typing import Any

from service.contract.recommendation import Recommendation
from service.exports.base import Export
from service.exports.heads import yaml_file
from service.exports.hugging_face import ALLOCATOR, NO_ACCUMULATION
from service.exports.words import Target, Word, Words, alike, cannot, nearest, says

SCRIPT = cannot("the script that accelerate starts decides on it; the exports train.py and trainer are such scripts")
MIXED = nearest("autocast keeps the weights that it has cast, which takes memory", mixed_precision="bf16")
FP8 = says(mixed_precision="fp8", fp8_config={"backend": "AO", "pad_inner_dim": True})


def compiled(word: Word, **options: Any) -> Word:
    """A word for compiling: dynamo's configuration."""
    return Word(word.verdict, word.note, {"dynamo_config": {"dynamo_backend": "INDUCTOR", **options}})


LAYERS = compiled(
    says(),
    dynamo_mode="default",
    dynamo_use_dynamic=True,
    dynamo_use_fullgraph=False,
    dynamo_use_regional_compilation=True,
)
WHOLE = {"dynamo_use_dynamic": True, "dynamo_use_fullgraph": False, "dynamo_use_regional_compilation": False}
WORDS: Words = {
    "precision": {
        **alike(says(mixed_precision="no"), "checkpoint", "fp32", "bf16", "fp16", "fp64"),
        **alike(
            cannot("the precision of float32 matmuls is the script's to set", mixed_precision="no"),
            "tf32",
            "fp32-medium",
        ),
        "bf16-mixed": says(mixed_precision="bf16"),
        "bf16-mixed-uncached": MIXED,
        "fp16-mixed": says(mixed_precision="fp16"),
    },
    "float8": {
        "off": says(fp8_config={}),
        "tensorwise": FP8,
        **alike(nearest("one scale a tensor, not a row", **FP8.keys), "rowwise", "rowwise-high-precision-gradients"),
    },
    "attention": alike(
        SCRIPT,
        *("eager", "sdpa", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-math", "flex", "varlen"),
        *("flash-attention-2", "flash-attention-3"),
    )
    | {"sdpa": says("it is what transformers does unasked")},
    "kernels": {"off": says(), **alike(SCRIPT, "liger", "liger-rope", "liger-rms-norm", "liger-swiglu", "hub")},
    "experts": {"as-is": says(), **alike(SCRIPT, "eager", "batched", "grouped")},
    "normalisation": {"as-is": says(), **alike(SCRIPT, "low-precision", "apex-fused")},
    "head": {"logits": says(), **alike(SCRIPT, "chunked", "cut-cross-entropy", "liger")},
    "vocabulary": {"as-is": says(), **alike(SCRIPT, "multiple-8", "multiple-64")},
    "optimizer": alike(
        SCRIPT,
        *("adamw-loop", "adamw-foreach", "adamw-fused", "adamw-offloaded", "adamw-in-backward", "adamw-8bit"),
        *("adamw-8bit-stable-embedding", "paged-adamw-8bit", "adamw-bnb-32bit", "paged-adamw-32bit"),
        *("adamw-torchao-8bit", "adamw-torchao-4bit", "adamw-torchao-fp8", "adamw-stochastic-rounding"),
        *("apex-fused-adam", "anyprecision", "adafactor", "lion", "galore", "sgd"),
    ),
    "checkpointing": {"off": says(), **alike(SCRIPT, "full", "every-2", "every-4", "selective", "offloaded")},
    "compile": {
        "off": says(dynamo_config={}),
        "per-layer": LAYERS,
        "per-layer-max-autotune": compiled(
            says(), **{**LAYERS.keys["dynamo_config"], "dynamo_mode": "max-autotune-no-cudagraphs"}
        ),
        "per-layer-aot-eager": Word(
            "says", "", {"dynamo_config": {**LAYERS.keys["dynamo_config"], "dynamo_backend": "AOT_EAGER"}}
        ),
        "whole": compiled(says(), dynamo_mode="default", **WHOLE),
        "whole-reduce-overhead": compiled(
            nearest(NO_ACCUMULATION), dynamo_mode="reduce-overhead", **{**WHOLE, "dynamo_use_dynamic": False}
        ),
        "whole-max-autotune": compiled(says(), dynamo_mode="max-autotune-no-cudagraphs", **WHOLE),
        "whole-cudagraphs": Word(
            "nearest",
            NO_ACCUMULATION,
            {"dynamo_config": {"dynamo_backend": "CUDAGRAPHS", **WHOLE, "dynamo_use_dynamic": False}},
        ),
    },
    "activations": {"all": says(), **alike(SCRIPT, "half", "fifth")},
    "batching": alike(SCRIPT, "padded", "sorted", "token-budget", "grouped", "packed", "padding-free", "packed-global"),
    "padding": {"longest": says(), **alike(SCRIPT, "multiple-8", "multiple-64", "max")},
    "quantization": alike(SCRIPT, "nf4-double", "nf4", "int8", "torchao-int8", "torchao-float8"),
    "adapter": alike(SCRIPT, "as-asked", "base-dtype", "attention-only", "rslora", "dora"),
    "projections": {"peft": says(), **alike(SCRIPT, "without-cast", "fused")},
    "loading": alike(SCRIPT, "ahead", "unpinned", "workers-2", "workers-4"),
    "allocator": ALLOCATOR,
    "cache": {"kept": says(), "emptied": SCRIPT},
    "evaluation": alike(SCRIPT, "loss", "loss-16bit", "generation"),
}
NEUTRAL: dict[str, Any] = {"mixed_precision": "no", "dynamo_config": {}, "fp8_config": {}}
TARGET = Target(
    title="accelerate",
    package="accelerate",
    version="1.15.0",
    pins=("torch>=2.0.0",),
    run="accelerate launch --config_file accelerate.yaml trainer.py",
    neutral=NEUTRAL,
    words=WORDS,
    tasks=("causal-lm", "masked-lm", "sequence-classification"),
    differs=(
        "it says where a script runs and in which precision; everything else is in the script, as in the export "
        "trainer, so that nothing is lost where that script is started with it",
    ),
)


def write(recommendation: Recommendation) -> str:
    """The configuration file for one process on one device."""
    on_cpu = recommendation.environment.get("device") == "cpu"
    job = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "num_processes": 1,
        "num_machines": 1,
        "machine_rank": 0,
        "use_cpu": on_cpu,
        "debug": False,
    }
    return yaml_file(TARGET, recommendation, job)


EXPORT = Export(
    "accelerate",
    "a configuration file for `accelerate launch`",
    write,
    "accelerate.yaml",
    "a script of your own on accelerate, or the script of the export trainer",
    TARGET,
)
