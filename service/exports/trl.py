"""A script for TRL's SFTTrainer: the data, the model and the levers as in train.py, the loop and the packing TRL's."""

from __future__ import annotations

from typing import Any

from service.contract.recommendation import Recommendation
from service.errors import NotYet
from service.exports.base import Export
from service.exports.job_settings import spec_of, trainer_arguments, was_packed
from service.exports.layout import by_lever, head
from service.exports.printing import MODULES, assigned, fields_of, script
from service.exports.trainer import CODE, INSTEAD, in_code
from service.exports.trainer import NEUTRAL as OF_TRAINER
from service.exports.trainer import WORDS as TRAINER_WORDS
from service.exports.trl_yaml import BF16_ADAPTERS, PACKING, ROW_BY_ROW, SHARED, size_of
from service.exports.words import Target, Words, alike, nearest, says
from service.levers.attention import FLASH

UNPACKED = {"batching": ("padded", "sorted", "grouped", "token-budget")}
MASKED = nearest("sdpa with a mask, as TRL does not tell where the samples of the rows end that it packs")
WORDS: Words = {
    **TRAINER_WORDS,
    "attention": {"varlen": CODE.only(UNPACKED, MASKED)},
    "head": {},  # not by Trainer's argument for Liger: the loss is the script's own
    "batching": {
        **alike(says(packing=False), "padded", "sorted", "grouped"),
        "token-budget": TRAINER_WORDS["batching"]["token-budget"],
        **alike(PACKING, "packed", "padding-free"),
        "packed-global": says(packing=True, packing_strategy="bfd").only({"attention": FLASH}, ROW_BY_ROW),
    },
    "padding": {**SHARED["padding"], "max": CODE.only(UNPACKED, SHARED["padding"]["max"])},
    "adapter": alike(
        CODE.only({"method": ("lora", "full")}, BF16_ADAPTERS), "as-asked", "attention-only", "rslora", "dora"
    ),
}
# TRL checkpoints where nothing is said, cuts samples at 1,024 tokens, and adds the loss that balances experts.
NEUTRAL: dict[str, Any] = {
    **OF_TRAINER,
    "activation_offloading": False,
    "packing": False,
    "padding_free": False,
    "pad_to_multiple_of": None,
    "loss_type": "nll",
    "router_aux_loss_coef": 0.0,
}
TARGET = Target(
    title="TRL",
    package="trl",
    version="1.16.0",
    pins=("transformers>=4.56.2", "accelerate>=1.10.1", "datasets>=4.7.0"),
    run="python trl_sft.py [--model M] [--data D] [--max-steps N] [--output DIR] [--resume] [--log FILE]",
    neutral=NEUTRAL,
    words=WORDS,
    rest=CODE,
    differs=(
        "activation_checkpointing needs transformers 5.23 or newer",
        "the loss is the measured one, so that its log has no entropy and token accuracy in training",
    ),
)
REPLACED = {"batching": {"token-budget": "sorted"}, "optimizer": INSTEAD["optimizer"]}
WHERE_PACKED = {"attention": {"varlen": "sdpa"}, "padding": {"max": "longest"}}


def write(recommendation: Recommendation) -> str:
    """The script; NotYet where TRL has nothing for the task."""
    if why := TARGET.refuses(recommendation):
        raise NotYet(why)
    packed, size = was_packed(recommendation), size_of(recommendation)
    job = {
        **trainer_arguments(recommendation, size, between="no"),
        "max_length": spec_of(recommendation).dataset.max_length,
        "dataset_kwargs": {"skip_prepare_dataset": not packed},
        "logging_nan_inf_filter": False,
        "report_to": "none",
    }
    levers = in_code(TARGET, recommendation, REPLACED | (WHERE_PACKED if packed else {}))
    fields = fields_of(recommendation, levers, size.micro)
    values = {"ARGUMENTS": assigned([("the job", job), *by_lever(TARGET, recommendation)])}
    modules = (*MODULES, "trainers", "with_trl")
    return script(fields, head(TARGET, recommendation), "trl_sft.py", modules, values)


EXPORT = Export("trl", "a script for TRL's SFTTrainer", write, "trl_sft.py", "TRL's SFTTrainer", TARGET)
