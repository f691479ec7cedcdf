"""The jobs behind the tables: models by size, real data that every machine has."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.published.tables import Row, Table
from service.contract.configuration import Configuration
from service.contract.job import JobSpec
from service.levers import LEVERS

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "llama-13m"
WEIGHTS = "llama-weights"
EVALUATED_AFTER = 3  # steps: enough for an evaluation in the middle
IDS: dict[str, Any] = {"vocab_size": 8192, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Size:
    """How large the models are, how long the rows, steps that are trained, a batch's divisor, which rows are kept."""

    hidden: int
    layers: int
    heads: int
    length: int
    steps: int
    divide: int
    every: int


SIZES = {"tiny": Size(64, 2, 4, 32, 12, 8, 7), "full": Size(768, 12, 12, 256, 200, 1, 1)}


def config(model: str, size: Size) -> dict[str, Any]:
    """A model's config.json; dropout is off, so that every attention can be compared."""
    if model == "distilbert":
        shape = {"dim": size.hidden, "hidden_dim": 4 * size.hidden, "n_layers": size.layers // 2 or 1}
        names = {"architectures": ["DistilBertForMaskedLM"], "model_type": "distilbert", "n_heads": size.heads}
        return IDS | names | shape | {"dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 512}
    shape = {"hidden_size": size.hidden, "num_hidden_layers": size.layers, "num_attention_heads": size.heads}
    if model == "bert":
        names = {"architectures": ["BertForMaskedLM"], "model_type": "bert", "intermediate_size": 4 * size.hidden}
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return IDS | names | shape | off | {"max_position_embeddings": 512}
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 8 * size.hidden // 3}
    return IDS | names | shape | {"num_key_value_heads": size.heads, "max_position_embeddings": 2048}


def prepare(home: Path, size: Size, data: Path | None = None) -> None:
    """Write models, with a tokenizer that has a mask token, and data below `home`; `data` has them already."""
    for model in ("bert", "distilbert", "llama"):
        folder = home / model
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config(model, size)))
        shutil.copy(EXAMPLE / "tokenizer.json", folder)
        tokenizer = json.loads((EXAMPLE / "tokenizer_config.json").read_text())
        vocabulary = json.loads((EXAMPLE / "tokenizer.json").read_text())["model"]["vocab"]
        mask = next(token for token, number in vocabulary.items() if number == 3)
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"mask_token": mask}))
    if not (home / "data" / "functions.jsonl").exists():
        maker = ROOT / "examples" / "stdlib_data.py"
        if data is not None:
            shutil.copytree(data, home / "data", dirs_exist_ok=True)
        else:
            subprocess.run([sys.executable, str(maker), "--out", str(home / "data")], check=True, stdout=sys.stderr)
        for name in ("packages", "functions") if size.every > 1 else ():
            file = home / "data" / f"{name}.jsonl"
            rows = file.read_text().splitlines(keepends=True)
            file.write_text("".join(rows[:: size.every]))


def job(table: Table, row: Row, size: Size, home: Path, device: str) -> JobSpec:
    """The job of a row."""
    data = "functions.jsonl" if table.task == "causal-lm" else "packages.jsonl"
    model = {"source": str(home / table.model), "weights": "random"}
    if table.method == "qlora":  # quantising is a row of its own, so there is something to quantise
        model = {"source": str(home / WEIGHTS), "weights": "pretrained"}
    splits = {} if table.task == "causal-lm" else {"column": "split", "train": "train", "validation": "validation"}
    return JobSpec.model_validate(
        {
            "name": table.name,
            "model": model,
            "task": table.task,
            "dataset": {"source": str(home / "data" / data), "max_length": size.length, "splits": splits},
            "method": table.method,
            "training": {"effective_batch_size": batch(table, row, size), "learning_rate": row.rate},
            "search": {
                "verify": "quick",
                "quality": "allow",
                "soak_steps": size.steps if table.task != "causal-lm" else EVALUATED_AFTER,
            },
            "hardware": {"device": device},
        }
    )


def batch(table: Table, row: Row, size: Size) -> int:
    """Samples a step."""
    return table.effective or max(1, (row.batch or 1) // size.divide)


def configuration(table: Table, row: Row, size: Size, device: str) -> Configuration:
    """The row's configuration; classifiers are padded to the full length, as the tables' data were."""
    wanted = dict(row.levers)
    if device == "cpu" and wanted.get("precision") == "fp16-mixed":
        wanted["precision"] = "bf16-mixed"
    if size.divide > 1 and wanted.get("compile"):
        wanted["compile"] = "per-layer-aot-eager"
    padding = "max" if table.task != "causal-lm" else "longest"
    levers = {name: lever.baseline for name, lever in LEVERS.items()} | {"precision": "fp32", "padding": padding}
    micro = None if row.batch is None else max(1, row.batch // (size.divide if table.effective is None else 1))
    return Configuration.model_validate(
        {
            "method": table.method,
            "levers": levers | wanted,
            "effective_batch_size": batch(table, row, size),
            "learning_rate": row.rate,
            "micro_batch_size": micro,
        }
    )
