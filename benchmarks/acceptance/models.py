"""Models of published shapes with random weights, and rows of the lengths that are wanted, from Python's library."""

from __future__ import annotations

import json
import random
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.acceptance.place import ROOT, Place
from benchmarks.store import Row
from service.contract.measurement import DatasetFacts, Measurement

EXAMPLE = ROOT / "examples" / "llama-13m"
IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT: dict[str, Any] = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 32,
}
SHAPES: dict[str, dict[str, Any]] = {
    "bert-base": BERT,
    # Flash kernels have no attention dropout, so what they bring shows on this one only.
    "bert-base-no-attention-dropout": BERT | {"attention_probs_dropout_prob": 0.0},
    "llama-1b": LLAMA
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
    "llama-8b": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "tie_word_embeddings": False},
}
# FLOP a matmul's parameter and token: forward, and backward to the input, and without an adapter to the weights too.
TRAINED = {"full": 6, "lora": 4, "qlora": 4}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def child(source: str, target: str) -> Row:
    """A model's weights, drawn where that is fast, and kept as a checkpoint keeps them: loading is as a user's."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    config = AutoConfig.from_pretrained(source)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(target)
    return {}


def model(place: Place, name: str) -> Path:
    """The folder of a model; a Llama's has weights in it."""
    folder = place.home / "models" / name
    shape = SHAPES[name] | IDS
    if place.dry:
        shape |= SMALL | {"vocab_size": 8192} | ({"num_key_value_heads": 2} if "llama" in name else {})
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLE / part, folder / part)
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps(shape))
    if "llama" in name and not any(folder.glob("*.safetensors")):
        drawn = folder.with_name(f"{name}-drawn")  # whole, or not there: it may be cut off
        place.child("models", str(folder), str(drawn))
        for file in drawn.iterdir():
            file.replace(folder / file.name)
    return folder


def data(place: Place, name: str) -> Path:
    """A file of rows: `functions`, `short`, `reviews`, `varying`, or `long`."""
    folder = place.home / "data"
    if not (folder / "functions.jsonl").exists():
        place.python(str(ROOT / "examples" / "stdlib_data.py"), "--out", str(folder))
    file = folder / f"{name}.jsonl"
    if file.exists():
        return file
    make = {"short": short, "reviews": reviews, "varying": varying, "long": longest}[name]
    rows = make(place, folder, random.Random(0))
    partial = file.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return partial.replace(file)


@lru_cache
def read(file: Path) -> list[dict[str, Any]]:
    """A jsonl file's rows."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def short(place: Place, folder: Path, _rng: random.Random) -> list[dict[str, Any]]:
    """Docstrings' first sentences and the package they are from: about as long as short reviews, 20 words."""
    rows = read(folder / "packages.jsonl")[: place.pick(None, 40)]
    return [{"text": row["text"].partition(". ")[0], "label": row["label"]} for row in rows]


def reviews(place: Place, folder: Path, rng: random.Random) -> list[dict[str, Any]]:
    """Docstrings of one package joined to the lengths of IMDB's reviews: 174 words in the median, 234 in the mean."""
    by_label: dict[int, list[str]] = {}
    for row in read(folder / "packages.jsonl"):
        by_label.setdefault(row["label"], []).append(row["text"])
    rows = []
    for _ in range(place.pick(4000, 40)):
        label, words = rng.choice(sorted(by_label)), int(rng.lognormvariate(5.16, 0.77)) // place.pick(1, 8)
        text: list[str] = []
        while len(text) < words:
            text += rng.choice(by_label[label]).split()
        rows.append({"text": " ".join(text[: max(words, 5)]), "label": label})
    return rows


def _functions(folder: Path, rng: random.Random, characters: int) -> str:
    """Functions one after the other, so many characters of them."""
    source, text = read(folder / "functions.jsonl")[:1000], ""
    while len(text) < characters:
        row = rng.choice(source)
        text += row["prompt"] + row["completion"] + "\n\n"
    return text[:characters]


def varying(place: Place, folder: Path, rng: random.Random) -> list[dict[str, Any]]:
    """Source code of very different lengths, about 400 tokens in the median and up to 2,048."""
    most = place.pick(7000, 400)
    lengths = [min(most, int(rng.lognormvariate(7.2, 1.0)) // place.pick(1, 10)) for _ in range(place.pick(1500, 40))]
    return [{"text": _functions(folder, rng, max(40, length))} for length in lengths]


def longest(place: Place, folder: Path, rng: random.Random) -> list[dict[str, Any]]:
    """Source code that fills rows of 4,096 tokens."""
    return [{"text": _functions(folder, rng, place.pick(24_000, 1200))} for _ in range(place.pick(500, 40))]


def flops_a_token(place: Place, name: str, method: str, task: str, measured: Measurement) -> float:
    """FLOP that training takes for a token: of the matmuls, the embedding left out, and of attention's products.

    As in PaLM's MFU (Chowdhery et al. 2022, appendix B), with the length of the row that a token is in, on average; a
    token of a causal model sees half of it. What is computed again is not counted.
    """
    shape = json.loads((place.home / "models" / name / "config.json").read_text())
    hidden, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["num_attention_heads"]
    causal = task == "causal-lm"
    keys = hidden // heads * shape.get("num_key_value_heads", heads)
    matrices = 3 if shape["model_type"] == "llama" else 2  # of an MLP
    matmuls = layers * (2 * hidden * (hidden + keys) + matrices * hidden * shape["intermediate_size"])
    matmuls += hidden * shape["vocab_size"] if task != "sequence-classification" else 0
    length = length_around_a_token(measured.dataset) if measured.dataset is not None else 0.0
    return float(TRAINED[method] * matmuls + 12 * layers * hidden * length * (0.5 if causal else 1.0))


def length_around_a_token(facts: DatasetFacts) -> float:
    """How long the row is that a token is in, on average: long rows have more tokens than there are of such rows.

    By the histogram, whose bins are taken at their middles, and all as much longer or shorter as the tokens say.
    """
    edges = sorted((int(edge), rows) for edge, rows in facts.histogram.items())
    lows = [0, *(edge for edge, _ in edges)]
    middles = [((low + edge) / 2, rows) for low, (edge, rows) in zip(lows, edges, strict=False)]
    scale = facts.tokens / sum(middle * rows for middle, rows in middles)
    return sum((scale * middle) ** 2 * rows for middle, rows in middles) / facts.tokens
