"""accelerate's configuration file, for `accelerate launch`: where a script runs, and in which precision."""

from __future__ import annotations

from typing import Any

from service.contract.recommendation import Recommendation
from service.exports.base import Export
from service.exports.hugging_face import ALLOCATOR, NO_ACCUMULATION
from service.exports.job_settings import on_cpu
from service.exports.layout import yaml_file
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
# Baselines that are what happens unasked; all else is the script's.
AS_IT_IS: Words = {
    "kernels": {"off": says()},
    "experts": {"as-is": says()},
    "normalisation": {"as-is": says()},
    "head": {"logits": says()},
    "vocabulary": {"as-is": says()},
    "checkpointing": {"off": says()},
    "activations": {"all": says()},
    "padding": {"longest": says()},
    "projections": {"peft": says()},
    "cache": {"kept": says()},
}
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
    "attention": {"sdpa": says("it is what transformers does unasked")},
    **AS_IT_IS,
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
    "allocator": ALLOCATOR,
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
    rest=SCRIPT,
    tasks=("causal-lm", "masked-lm", "sequence-classification"),
    differs=(
        "it says where a script runs and in which precision; everything else is in the script, as in the export "
        "trainer, so that nothing is lost where that script is started with it",
    ),
)


def write(recommendation: Recommendation) -> str:
    """The configuration file for one process on one device."""
    job = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "num_processes": 1,
        "num_machines": 1,
        "machine_rank": 0,
        "use_cpu": on_cpu(recommendation),
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
