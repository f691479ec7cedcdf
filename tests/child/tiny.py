"""Tiny random models, data and jobs for the tests of a trial: real ones, small enough for two slow cores.

DYNOTUNE_TEST_DEVICE=cuda builds what they train on the GPU: benchmarks/gpu_acceptance.py runs them so.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from service.contract.child import Workplace
from service.contract.configuration import Configuration
from service.contract.job import JobSpec
from tests.conftest import ROOT
from tests.factory import configuration
from training.recipe import Recipe
from training.source import tokenizer_of as load_tokenizer
from worker.child.build import Bundle, build
from worker.devices import open_device

DEVICE = os.environ.get("DYNOTUNE_TEST_DEVICE", "cpu")
VOCAB = 8192
# Of a tokenizer cut short: with all tokens, the head takes half of what a step of so small a model computes.
FEW = 1001
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "tie_word_embeddings": True}
TOKENIZERS: dict[tuple[Any, ...], Any] = {}
WORDS = [
    "return",
    "self",
    "value",
    "for",
    "line",
    "in",
    "path",
    "open",
    "read",
    "write",
    "not",
    "None",
    "raise",
    "Error",
    "key",
    "list",
    "dict",
    "index",
    "count",
]


def config(kind: str, initializer_range: float = 0.02, vocabulary: int = VOCAB) -> Any:
    """The configuration of a tiny model; KeyError for an unknown kind."""
    import transformers

    extra = {"llama": GROUPED, "qwen3": GROUPED | {"head_dim": 16}, "bert": {"num_labels": 3}}[kind]
    made = {"llama": "LlamaConfig", "qwen3": "Qwen3Config", "bert": "BertConfig"}[kind]
    return getattr(transformers, made)(
        **(SHAPE | {"vocab_size": vocabulary}), **IDS, **extra, initializer_range=initializer_range
    )


def draw(
    kind: str, attention: str = "sdpa", initializer_range: float = 0.02, seed: int = 0, vocabulary: int = VOCAB
) -> Any:
    """A model with seeded weights, in fp32 and training mode."""
    import transformers

    head = transformers.AutoModelForSequenceClassification if kind == "bert" else transformers.AutoModelForCausalLM
    torch.manual_seed(seed)
    made = config(kind, initializer_range, vocabulary)
    made.use_cache = False
    return head.from_config(made, dtype=torch.float32, attn_implementation=attention).train()


def save(kind: str, folder: Path, seed: int = 0, vocabulary: int = VOCAB) -> Path:
    """A model folder as a user has it: weights as safetensors, and the example's tokenizer, or its first tokens."""
    draw(kind, seed=seed, vocabulary=vocabulary).save_pretrained(folder)
    return with_tokenizer(folder, vocabulary)


def with_tokenizer(folder: Path, vocabulary: int = VOCAB) -> Path:
    """The folder, with the example's tokenizer; of its tokens only so many, from which all texts can still be made."""
    example = ROOT / "examples" / "llama-13m"
    shutil.copy(example / "tokenizer_config.json", folder / "tokenizer_config.json")
    made = json.loads((example / "tokenizer.json").read_text())
    kept = {token: number for token, number in made["model"]["vocab"].items() if number < vocabulary}
    merges = [pair for pair in made["model"]["merges"] if "".join(pair) in kept]
    made["model"] |= {"vocab": kept, "merges": merges}
    (folder / "tokenizer.json").write_text(json.dumps(made))
    return folder


def changed(source: Path, folder: Path, **changes: object) -> Path:
    """A copy of a model's folder whose configuration differs in these fields."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def text(rng: random.Random, words: int) -> str:
    """That many words."""
    return " ".join(rng.choice(WORDS) for _ in range(words))


def pairs(count: int, seed: int = 0, most: int = 60) -> list[dict[str, str]]:
    """Prompts and completions of very different lengths."""
    rng = random.Random(seed)
    return [
        {"prompt": text(rng, rng.randint(1, 12)), "completion": text(rng, rng.choice((2, 5, 11, 23, most)))}
        for _ in range(count)
    ]


def classes(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Texts with one of three labels."""
    rng = random.Random(seed)
    return [{"text": text(rng, rng.randint(1, 40)), "label": rng.randrange(3)} for _ in range(count)]


def write(path: Path, rows: Sequence[object]) -> Path:
    """The rows as jsonl."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def job(model: Path, data: Path, max_length: int = 64, **changes: Any) -> JobSpec:
    """A job on local folders; any field can be given."""
    values: dict[str, Any] = {
        "model": {"source": str(model)},
        "dataset": {"source": str(data), "max_length": max_length},
        "lora": {"r": 4, "alpha": 8},
        "training": {"effective_batch_size": 8, "learning_rate": 1e-3},
    }
    return JobSpec.model_validate(values | changes)


def workplace(*folders: Path, cache: Path | None = None, **more: Any) -> Workplace:
    """A workplace that allows the folders."""
    return Workplace(device=DEVICE, data_roots=folders, hub_cache=folders[0], job_cache=cache, **more)


def device() -> Any:
    """What the tests train on."""
    return open_device(DEVICE)


def bundle(spec: JobSpec, method: str = "lora", on: Any = None, effective: int = 8, **levers: Any) -> Bundle:
    """What a trial trains, in fp32 unless said otherwise."""
    return built(spec, configuration(method, effective, **({"precision": "fp32"} | levers)), on)


def built(spec: JobSpec, made: Configuration, on: Any = None, seed: int = 0) -> Bundle:
    """What a trial of this configuration trains."""
    folders = (Path(spec.model.source), Path(spec.dataset.source).parent)
    trained_on = on or device()
    torch.set_num_threads(1)  # the device takes all cores
    with warnings.catch_warnings():
        # peft 0.21 and the lever use the names that transformers before 5.23 has; 5.23 calls them deprecated.
        warnings.filterwarnings("ignore", ".(is_)?gradient_checkpointing(_enable)?. is deprecated", FutureWarning)
        return build(spec, made, trained_on, workplace(*folders), seed)


def tokenizer_of(folder: Path, recipe: Recipe) -> Any:
    """The folder's tokenizer, as a trial loads it, but only once as long as the folder's files are the same."""
    files = sorted((one.name, one.stat().st_mtime_ns) for one in folder.glob("*.json"))
    key = (folder, *recipe.source_options.items(), *files)
    if key not in TOKENIZERS:
        TOKENIZERS[key] = load_tokenizer(folder, recipe)
    return TOKENIZERS[key]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Copies of all gradients that are there; the model's are cleared."""
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def furthest(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """The largest difference between two sets of gradients; they must be of the same parameters."""
    assert first.keys() == second.keys() and first
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def numbers_of(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor of torchao's, which cannot be compared as it is; any other is one already."""
    return tensor.dequantize() if type(tensor).__module__.startswith("torchao") else tensor
