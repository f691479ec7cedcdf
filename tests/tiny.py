"""A job so small that it really runs in seconds: a 2-layer Llama, 200 short rows."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model(folder: Path) -> Path:
    """A model folder without weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "examples" / "llama-13m" / name, folder / name)
    return folder


def data(file: Path, rows: int = 200) -> Path:
    """Rows of prompt and completion, of very different lengths."""
    rng = random.Random(0)
    words = [
        "def",
        "return",
        "self",
        "value",
        "for",
        "in",
        "if",
        "not",
        "None",
        "import",
        "from",
        "class",
        "list",
        "dict",
    ]
    with file.open("w") as stream:
        for _ in range(rows):
            length = rng.choice((3, 5, 8, 60))
            row = {"prompt": rng.choice(words), "completion": " ".join(rng.choices(words, k=length))}
            stream.write(json.dumps(row) + "\n")
    return file


def job(folder: Path, **changes: Any) -> dict[str, Any]:
    """The job, with its model and data made in `folder`."""
    body: dict[str, Any] = {
        "name": "tiny",
        "model": {"source": str(model(folder / "model")), "weights": "random"},
        "dataset": {"source": str(data(folder / "data.jsonl")), "max_length": 64},
        "training": {"effective_batch_size": 8, "epochs": 1},
        "search": {"minutes": 0.5, "trials": 3, "verify": "quick", "soak_steps": 3},
        "hardware": {"memory_gib": 3, "device": "cpu"},
    }
    return body | changes
