"""A script for transformers' Trainer: the data, the model and the levers as in train.py, the loop Trainer's."""

from __future__ import annotations

from typing import Any

from service.contract.recommendation import Recommendation
from service.exports import hugging_face as hf
from service.exports.base import Export
from service.exports.job_settings import batch, trainer_arguments
from service.exports.layout import by_lever, head
from service.exports.printing import MODULES, assigned, fields_of, script
from service.exports.words import Target, Words, alike, nearest, says
from service.levers import LEVERS
from service.levers.kernels import switched_on

CODE = says("by the code of train.py, which the script holds")
SORTED = "its micro batches are of equally many samples; the samples of a step are sorted by length"
PACKS_NOT = nearest(f"Trainer packs nothing: {SORTED}")
WORDS: Words = {
    "precision": {
        # The code sets it after TrainingArguments are made, which would set it back.
        **alike(says("by the code of train.py, which the script holds", tf32=None), "tf32", "fp32-medium"),
        "bf16-mixed": says(bf16=True),
        "bf16-mixed-uncached": nearest(hf.CAST_KEPT, bf16=True),
        "fp16-mixed": says(fp16=True),
    },
    "kernels": {
        "off": says(use_liger_kernel=False),
        **hf.LIGER,
    },
    "head": {"liger": says(**switched_on("fused_linear_cross_entropy"))},
    "optimizer": {
        "adamw-in-backward": nearest("all gradients exist at once, as Trainer steps after the backward pass"),
    },
    "checkpointing": {
        "off": says(activation_checkpointing=False),
        "full": hf.checkpointed(),
        "every-2": hf.checkpointed(every_n_layers=2),
        "every-4": hf.checkpointed(every_n_layers=4),
    },
    # The script's code compiles, as it keeps inductor from wrong gradients, which Trainer would not.
    "compile": {"off": hf.COMPILE["off"]},
    "batching": {
        "token-budget": nearest(SORTED),
        **alike(PACKS_NOT, "packed", "padding-free", "packed-global"),
    },
    "loading": hf.LOADING,
    "cache": hf.CACHE,
    "evaluation": hf.EVALUATION,
}
# What the code would do a second time where Trainer's arguments say it already.
BY_ARGUMENT = ("kernels", "head", "checkpointing", "compile", "cache", "loading", "evaluation")
INSTEAD = {
    "batching": dict.fromkeys(("token-budget", "packed", "padding-free", "packed-global"), "sorted"),
    "optimizer": {"adamw-in-backward": "adamw-fused"},
}
NEUTRAL: dict[str, Any] = {
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "activation_checkpointing": False,
    "activation_checkpointing_kwargs": None,
    "use_liger_kernel": False,
    "liger_kernel_config": None,
    "torch_compile": False,
    "torch_compile_backend": None,
    "torch_compile_mode": None,
    "torch_empty_cache_steps": None,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": True,
    "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False,
    "bf16_full_eval": False,
}
TARGET = Target(
    title="transformers' Trainer",
    package="transformers",
    version="5.23.0",
    pins=("torch>=2.6", "accelerate>=1.1.0"),
    run="python trainer.py [--model M] [--data D] [--max-steps N] [--output DIR] [--resume] [--log FILE]",
    neutral=NEUTRAL,
    words=WORDS,
    rest=CODE,
    differs=(
        "dropout draws other random numbers",
        "its evaluation loss is the mean of the batches' means and not over tokens, and it tells no accuracy",
    ),
    tasks=None,
)


def in_code(target: Target, recommendation: Recommendation, instead: dict[str, dict[str, str]]) -> dict[str, str]:
    """The levers of the script's own code: at the baseline where arguments set them, and some at the nearest choice."""
    levers = dict(recommendation.configuration.levers)
    for name, word in target.spoken(recommendation).items():
        levers[name] = instead.get(name, {}).get(levers[name], levers[name])
        if name in BY_ARGUMENT and word is not CODE:
            levers[name] = LEVERS[name].baseline
    return levers


def job_arguments(recommendation: Recommendation) -> dict[str, Any]:
    """The job's part of the arguments."""
    found = trainer_arguments(recommendation, batch(recommendation), between="no")
    return {
        **found,
        "label_names": ["labels"],
        "remove_unused_columns": False,
        "prediction_loss_only": True,
        "logging_nan_inf_filter": False,
        "report_to": "none",
    }


def write(recommendation: Recommendation) -> str:
    """The script."""
    fields = fields_of(recommendation, in_code(TARGET, recommendation, INSTEAD), batch(recommendation).micro)
    values = {"ARGUMENTS": assigned([("the job", job_arguments(recommendation)), *by_lever(TARGET, recommendation)])}
    modules = (*MODULES, "trainers", "with_trainer")
    return script(fields, head(TARGET, recommendation), "trainer.py", modules, values)


EXPORT = Export(
    "trainer",
    "a script for transformers' Trainer",
    write,
    "trainer.py",
    "transformers' Trainer and its callbacks",
    TARGET,
)
