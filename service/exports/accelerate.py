"""accelerate's configuration file, for `accelerate launch`: where a script runs, and in which precision."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill, indent
from typing import Any

import yaml

from service.contract.recommendation import Recommendation
from service.exports.base import Export
from service.exports.hugging_face import ALLOCATOR, CAST_KEPT, NO_ACCUMULATION
from service.exports.job_settings import on_cpu
from service.exports.layout import WIDTH, commented, yaml_file
from service.exports.words import Target, Word, Words, alike, cannot, nearest, says

INDENT = "    "
OTHERS = (
    "For a script of your own that leaves this to accelerate, in place of what is above. Not for trainer.py, which\n"
    "does it itself: accelerate would do it a second time."
)
SCRIPT = cannot("the script that accelerate starts decides on it; the exports train.py and trainer are such scripts")
MIXED = nearest(CAST_KEPT, mixed_precision="bf16")
FP8 = says(mixed_precision="fp8", fp8_config={"backend": "AO", "pad_inner_dim": True})
REGIONAL = {"dynamo_use_dynamic": True, "dynamo_use_fullgraph": False, "dynamo_use_regional_compilation": True}
WHOLE = REGIONAL | {"dynamo_use_regional_compilation": False}
STATIC = WHOLE | {"dynamo_use_dynamic": False}


def compiled(how: Mapping[str, bool], note: str = "", mode: str = "default", backend: str = "INDUCTOR") -> Word:
    """A word for compiling: dynamo's configuration."""
    keys = {"dynamo_config": {"dynamo_backend": backend, "dynamo_mode": mode, **how}}
    return nearest(note, **keys) if note else says(**keys)


# For scripts other than trainer.py, which does this itself: accelerate would do it a second time.
FOR_OTHERS: Words = {
    "float8": {
        "tensorwise": FP8,
        **alike(nearest("one scale a tensor, not a row", **FP8.keys), "rowwise", "rowwise-high-precision-gradients"),
    },
    "compile": {
        "per-layer": compiled(REGIONAL),
        "per-layer-max-autotune": compiled(REGIONAL, mode="max-autotune-no-cudagraphs"),
        "per-layer-aot-eager": compiled(REGIONAL, backend="AOT_EAGER"),
        "whole": compiled(WHOLE),
        "whole-reduce-overhead": compiled(STATIC, NO_ACCUMULATION, "reduce-overhead"),
        "whole-max-autotune": compiled(WHOLE, mode="max-autotune-no-cudagraphs"),
        "whole-cudagraphs": compiled(STATIC, NO_ACCUMULATION, backend="CUDAGRAPHS"),
    },
}
# Baselines that need no setting; all else is up to the script.
AS_IT_IS: Words = {
    "float8": {"off": says()},
    "kernels": {"off": says()},
    "experts": {"as-is": says()},
    "normalisation": {"as-is": says()},
    "head": {"logits": says()},
    "vocabulary": {"as-is": says()},
    "checkpointing": {"off": says()},
    "compile": {"off": says()},
    "activations": {"all": says()},
    "padding": {"longest": says()},
    "projections": {"peft": says()},
    "cache": {"kept": says()},
}
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
    "attention": {"sdpa": says("it is what transformers does unasked")},
    **AS_IT_IS,
    "allocator": ALLOCATOR,
}
NEUTRAL: dict[str, Any] = {"mixed_precision": "no"}
TARGET = Target(
    title="accelerate",
    package="accelerate",
    version="1.15.0",
    pins=("torch>=2.0.0",),
    run="accelerate launch --config_file accelerate.yaml trainer.py",
    neutral=NEUTRAL,
    words=WORDS,
    rest=SCRIPT,
    tasks=None,
    differs=(
        "it says where a script runs and in which precision; everything else is in the script, as in the export "
        "trainer, so that nothing is lost where that script is started with it",
        "for a script that leaves compiling and float8 to accelerate, the keys stand at the end as comments: with "
        "trainer.py, accelerate would do both a second time",
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
    return yaml_file(TARGET, recommendation, job) + for_others(recommendation)


def for_others(recommendation: Recommendation) -> str:
    """As comments, the keys of what trainer.py does itself; nothing where it does nothing of the kind."""
    parts = []
    for lever, words in FOR_OTHERS.items():
        choice = recommendation.configuration.levers.get(lever, "")
        if word := words.get(choice):
            nearly = f", the nearest: {word.note}" if word.note else ""
            keys = yaml.safe_dump(dict(word.keys), sort_keys=False)
            parts += [fill(f"{lever}={choice}{nearly}", WIDTH), "", indent(keys, INDENT)]
    if not parts:
        return ""
    return "\n" + commented("\n".join([OTHERS, "", *parts]))


EXPORT = Export(
    "accelerate",
    "a configuration file for `accelerate launch`",
    write,
    "accelerate.yaml",
    "a script of your own on accelerate, or the script of the export trainer",
    TARGET,
)
