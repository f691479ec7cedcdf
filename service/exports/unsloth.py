"""A script for Unsloth, which loads and adapts the model by its own kernels and trains with TRL's SFTTrainer."""

from __future__ import annotations

import json
import re
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
    loader,
    lora_targets,
    spec_of,
    trainer_arguments,
    unread,
    was_packed,
    whole,
)
from service.exports.layout import by_lever, head
from service.exports.printing import assigned, formatted, quoted
from service.exports.words import Target, Word, Words, alike, cannot, nearest, says

# Keys begin with where they go: `load` FastLanguageModel.from_pretrained, `adapt` get_peft_model, `train` SFTConfig.
OWN = "Unsloth computes the model by kernels of its own"
OWN_KERNELS = nearest(f"{OWN}, whatever is asked for")
OWN_ATTENTION = nearest(f"{OWN}: it takes FlashAttention where that is installed, else xformers or sdpa")
CHECKPOINTS = "every layer is checkpointed by Unsloth's own code"
PACKED = nearest(hf.EPOCH_PACKED, **{"train.packing": True})


def under(section: str, words: dict[str, Word]) -> dict[str, Word]:
    """Words with their keys in a section."""
    return {
        choice: Word(
            word.verdict, word.note, {f"{section}.{key}": value for key, value in word.keys.items()}, word.environment
        )
        for choice, word in words.items()
    }


class Dtype(str):
    """A dtype of torch by its name, printed as Python: as text, Unsloth takes only some names, and not always."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"torch.{self}"


def dtype(name: str, note: str = "", **flags: bool) -> Word:
    """Weights in this format, with the flag of autocast."""
    keys = {"load.dtype": Dtype(name), **{f"train.{flag}": value for flag, value in flags.items()}}
    return nearest(note, **keys) if note else says(**keys)


def mixed(name: str, flag: str, note: str = "") -> Word:
    """Autocast over frozen weights of 16 bits."""
    return dtype(name, note, **{flag: True}).only({"method": hf.ADAPTERS}, dtype(name, hf.HALF_MASTERS, **{flag: True}))


WORDS: Words = {
    **hf.CODE,
    **hf.FLOAT8,
    "precision": {
        "checkpoint": nearest("bf16 where the device has it, under autocast"),
        "fp32": dtype("float32"),
        **alike(dtype("float32", "float32 matmuls are as torch's own settings leave them"), "tf32", "fp32-medium"),
        "fp64": dtype("float32", "32 bits"),
        "bf16-mixed": mixed("bfloat16", "bf16"),
        "bf16-mixed-uncached": mixed("bfloat16", "bf16", hf.CAST_KEPT),
        "fp16-mixed": mixed("float16", "fp16"),
        "bf16": dtype("bfloat16", "under autocast, adapters in fp32", bf16=True),
        "fp16": dtype("float16", "under autocast with a gradient scaler, adapters in fp32", fp16=True),
    },
    "attention": alike(
        OWN_ATTENTION,
        *("eager", "sdpa", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-math", "flex", "varlen"),
        "flash-attention-3",
    )
    | {"flash-attention-2": says("where flash-attn is installed")},
    "kernels": alike(OWN_KERNELS, "off", "liger", "liger-rope", "liger-rms-norm", "liger-swiglu", "hub"),
    "experts": alike(OWN_KERNELS, "as-is", "eager", "batched", "grouped"),
    "head": alike(
        nearest(f"{OWN}, its cross-entropy in chunks among them"), "logits", "chunked", "cut-cross-entropy", "liger"
    ),
    "optimizer": under("train", hf.optimizers()),
    "checkpointing": {
        "off": says(**{"load.use_gradient_checkpointing": False, "adapt.use_gradient_checkpointing": False}),
        "full": says(**{"load.use_gradient_checkpointing": True, "adapt.use_gradient_checkpointing": True}),
        **alike(
            nearest(CHECKPOINTS, **{"load.use_gradient_checkpointing": True, "adapt.use_gradient_checkpointing": True}),
            *("every-2", "every-4", "selective"),
        ),
        "offloaded": nearest(
            f"{CHECKPOINTS}, inputs in host memory",
            **{"load.use_gradient_checkpointing": "unsloth", "adapt.use_gradient_checkpointing": "unsloth"},
        ),
    },
    "compile": alike(
        nearest("it compiles what it chooses itself"),
        *("off", "per-layer", "per-layer-max-autotune", "per-layer-aot-eager"),
        *("whole", "whole-reduce-overhead", "whole-max-autotune", "whole-cudagraphs"),
    ),
    "batching": {
        "padded": says(
            **{"train.packing": False, "train.padding_free": False, "train.train_sampling_strategy": "random"}
        ),
        **alike(
            nearest(hf.GROUPED_BY_LENGTH, **{"train.train_sampling_strategy": "group_by_length"}),
            *("sorted", "token-budget", "grouped"),
        ),
        **alike(PACKED, "packed", "padding-free"),
        "packed-global": says(**{"train.packing": True}),
    },
    "padding": {
        "longest": says(**{"train.pad_to_multiple_of": None}),
        "multiple-8": says(**{"train.pad_to_multiple_of": 8}),
        "multiple-64": says(**{"train.pad_to_multiple_of": 64}),
        "max": cannot("its collator pads to the longest row of a micro batch or to a multiple"),
    },
    "quantization": {
        "nf4-double": says(**{"load.load_in_4bit": True}),
        "nf4": nearest("scales are quantised again", **{"load.load_in_4bit": True}),
        "int8": says(**{"load.load_in_8bit": True}),
        **alike(nearest(hf.INT8_INSTEAD, **{"load.load_in_8bit": True}), "torchao-int8", "torchao-float8"),
    },
    "adapter": {
        "as-asked": says(),
        "base-dtype": cannot("it keeps adapters in fp32"),
        "attention-only": says("by its target modules"),
        "rslora": says(**{"adapt.use_rslora": True}),
        "dora": says(**{"adapt.use_dora": True}),
    },
    "projections": {
        "peft": nearest(f"{OWN}, those with adapters among them"),
        "without-cast": nearest(f"{OWN}, those with adapters among them"),
        "fused": nearest(f"{OWN}, those with adapters among them"),
    },
    "loading": under("train", hf.LOADING),
    "cache": under("train", hf.CACHE),
    "evaluation": under("train", hf.EVALUATION),
    "allocator": hf.ALLOCATOR,
}
# What Unsloth does where nothing is said: a base of 4 bits, checkpointing by its own code, no padding where it can.
NEUTRAL: dict[str, Any] = {
    "load.dtype": None,
    "load.load_in_4bit": False,
    "load.load_in_8bit": False,
    "load.use_gradient_checkpointing": False,
    "adapt.use_gradient_checkpointing": False,
    "adapt.use_rslora": False,
    "adapt.use_dora": False,
    "train.bf16": False,
    "train.fp16": False,
    "train.optim": "adamw_torch_fused",
    "train.packing": False,
    "train.padding_free": False,
    "train.pad_to_multiple_of": None,
    "train.train_sampling_strategy": "random",
    "train.dataloader_num_workers": 0,
    "train.dataloader_pin_memory": True,
    "train.dataloader_prefetch_factor": None,
    "train.dataloader_persistent_workers": False,
    "train.torch_empty_cache_steps": None,
    "train.bf16_full_eval": False,
}
TARGET = Target(
    title="Unsloth",
    package="unsloth",
    version="2026.10.9",
    pins=("torch>=2.4,<2.15", "transformers<=5.17.0", "trl<=1.15.0", "peft>=0.18", "bitsandbytes>=0.45.5"),
    run="python unsloth_train.py",
    neutral=NEUTRAL,
    words=WORDS,
    differs=(
        "it needs a GPU, and knows the families of models that it lists",
        "warmup_steps as a share, and train_sampling_strategy, need transformers 5.2 or newer",
    ),
)


def write(recommendation: Recommendation) -> str:
    """The script; NotYet where this export has nothing for the task."""
    if why := TARGET.refuses(recommendation):
        raise NotYet(why)
    spec, data = spec_of(recommendation), data_of(recommendation)
    parts: dict[str, list[tuple[str, dict[str, Any]]]] = {"load": [], "adapt": [], "train": []}
    for title, keys in by_lever(TARGET, recommendation):
        for section, lines in parts.items():
            mine = {key.partition(".")[2]: value for key, value in keys.items() if key.startswith(section + ".")}
            lines += [(title, mine)] if mine else []
    load = {
        "model_name": spec.model.source,
        "max_seq_length": spec.dataset.max_length,
        "full_finetuning": recommendation.LoraConfig is None,
        "revision": spec.model.revision,
        "trust_remote_code": recommendation.evidence.measurement.remote_code,
        "random_state": spec.training.seed,
    }
    adapt = {
        "r": spec.lora.r,
        "lora_alpha": whole(spec.lora.alpha),
        "lora_dropout": spec.lora.dropout,
        "target_modules": lora_targets(recommendation),
        "bias": "none",
        "random_state": spec.training.seed,
    }
    chats, learns_all = "messages" in data.columns, spec.training.loss_on == "all"
    train = {
        "output_dir": "output",
        "max_length": spec.dataset.max_length,
        "dataset_text_field": "text",
        "completion_only_loss": "completion" in data.columns and not learns_all,
        "assistant_only_loss": chats and not learns_all,
        **trainer_arguments(recommendation, batch(recommendation, packs=was_packed(recommendation))),
    }
    train.pop("use_cpu", None)  # there is no Unsloth without a GPU
    read_otherwise = unread(recommendation, reads=("split", "revision", "template", "csv", "numbers"))
    template = data.form.chat_template
    replaced = {
        "LOAD": assigned([("the job", load), *parts["load"]]),
        "ADAPT": assigned([("the job", adapt), *parts["adapt"]]),
        "TRAIN": assigned([("the job", train), *parts["train"]]),
        "COLUMNS": json.dumps({column: kind for kind, column in data.columns.items()}),
        "CONTEXT": CONTEXT if "context" in data.columns else "",
        "SOURCE": source(recommendation),
        "VALUE": value(data),
        "FEATURES": "None" if chats else 'Features(dict.fromkeys(COLUMNS.values(), Value("string")))',
        "ENDED": ENDED if "text" in data.columns else "",
        "HELD_OUT": repr(spec.dataset.splits.validation_fraction),
        "SEED": repr(spec.training.seed),
        "TEMPLATE": f"tokenizer.chat_template = {template!r}" if template else "",
        "ADAPTED": "" if recommendation.LoraConfig else "# full finetuning: no adapter\n    # ",
    }
    filled = re.sub(r"<([A-Z_]+)>", lambda found: replaced[found[1]], SCRIPT)
    return formatted(quoted(head(TARGET, recommendation, read_otherwise)) + filled)


def source(recommendation: Recommendation) -> str:
    """The arguments of `datasets.load_dataset`. Columns of csv files are text, as they were when it was measured."""
    spec, data = spec_of(recommendation), data_of(recommendation)
    place = "data_dir" if data.is_folder else "data_files"
    found = (
        {"path": loader(data), place: spec.dataset.source, "split": "train"}
        if data.is_local
        else {"path": spec.dataset.source, "split": spec.dataset.splits.train, "revision": spec.dataset.revision}
        | ({"name": named} if (named := hub_configuration(recommendation)) else {})
    )
    if loader(data) != "csv":
        return f"**{found!r}"
    return f"**{found | data.form.csv_options!r}, converters=dict.fromkeys(COLUMNS, str), keep_default_na=False"


def value(data: DatasetFacts) -> str:
    """What becomes of a column's value in a row: text as it was measured, or turns with `role` and `content`."""
    if "messages" not in data.columns:
        return '"" if row[name] is None else str(row[name])'
    if not data.form.sharegpt:
        return "row[name]"
    role = '{"human": "user", "gpt": "assistant"}.get(turn["from"], turn["from"])'
    turns = f'[{{"role": {role}, "content": turn["value"]}} for turn in row[name]]'
    return f'{turns} if known == "messages" else row[name]' if "tools" in data.columns else turns


CONTEXT = '''if more := found["context"]:  # what the prompt is about
        found["prompt"] += f"\\n{more}"'''
# Unsloth writes the end token behind completions, and not behind texts.
ENDED = """end = tokenizer.eos_token or ""
    rows = rows.map(lambda row: {"text": row["text"].removesuffix(end) + end})"""
SCRIPT = '''
from unsloth import FastLanguageModel  # before transformers and trl, which it changes

# isort: split
import torch
from datasets import Features, Value, load_dataset
from trl import SFTConfig, SFTTrainer

LOAD = <LOAD>
ADAPT = <ADAPT>
TRAIN = <TRAIN>
COLUMNS = <COLUMNS>  # the data's name of a column -> the name by which TRL knows it


def read(row):
    """A row as it was measured, its columns named as TRL knows them."""
    found = {known: <VALUE> for name, known in COLUMNS.items()}
    <CONTEXT>
    return found


def main():
    """Load, adapt, train, save."""
    model, tokenizer = FastLanguageModel.from_pretrained(**LOAD)
    <TEMPLATE>
    <ADAPTED>model = FastLanguageModel.get_peft_model(model, **ADAPT)
    rows = load_dataset(<SOURCE>).select_columns(list(COLUMNS))
    rows = rows.map(read, remove_columns=rows.column_names, features=<FEATURES>)
    <ENDED>
    parts = rows.train_test_split(test_size=<HELD_OUT>, seed=<SEED>)
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        args=SFTConfig(**TRAIN),
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
'''
EXPORT = Export("unsloth", "a script for Unsloth", write, "unsloth_train.py", "Unsloth", TARGET)
