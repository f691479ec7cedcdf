"""The cases: three small Llamas x LoRA/full x fp32/bf16, each under a memory cap at one length."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from service.contract.configuration import Configuration
from service.contract.job import JobSpec
from service.levers import LEVERS

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "llama-13m"
# More than any size that fits: memory is the bound, and every step accumulates.
EFFECTIVE = 4096
# What differs from examples/llama-13m, whose tokenizer all share.
MODELS: dict[str, dict[str, int]] = {
    "llama-2m": {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "llama-6m": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
    },
    "llama-13m": {},
}


@dataclass(frozen=True)
class Case:
    """One configuration under one cap; None is all the memory that the device has."""

    model: str
    method: str
    precision: str
    gib: float | None
    length: int
    device: str = "cpu"
    weights: str = "random"

    @property
    def name(self) -> str:
        """As the table shows it, and as `--case` takes it."""
        cap = "" if self.gib is None else f" {self.gib:g}GiB"
        return f"{self.model} {self.method} {self.precision}{cap} {self.length}"

    def spec(self, home: Path) -> JobSpec:
        """The job whose largest batch is wanted."""
        return JobSpec.model_validate(
            {
                "model": {"source": str(home / "models" / self.model), "weights": self.weights},
                "dataset": {"source": str(home / "data" / "functions.jsonl"), "max_length": self.length},
                "method": self.method,
                "training": {"effective_batch_size": EFFECTIVE, "learning_rate": 1e-4},
                "search": {"verify": "quick"},
                "hardware": {"device": self.device, "memory_gib": self.gib},
            }
        )

    def configuration(self) -> Configuration:
        """The baseline in this case's precision."""
        levers = {name: lever.baseline for name, lever in LEVERS.items()} | {"precision": self.precision}
        return Configuration.model_validate(
            {
                "method": self.method,
                "levers": levers,
                "effective_batch_size": EFFECTIVE,
                "learning_rate": 1e-4,
                "micro_batch_size": None,
            }
        )

    @property
    def cache(self) -> str:
        """Cases with the same tokens share them: all models have one tokenizer."""
        return f"functions-{self.length}"


# (cap in GiB, length) by precision, model and method: maxima from 8 to about 80, and few enough tokens that a step at
# the maximum takes about a second. A CPU without bf16 of its own computes it ten times slower than fp32, so those cases
# are smaller.
SHAPES = {
    ("fp32", "llama-2m", "lora"): (1.5, 128),
    ("fp32", "llama-2m", "full"): (1.0, 128),
    ("fp32", "llama-6m", "lora"): (1.0, 256),
    ("fp32", "llama-6m", "full"): (1.5, 512),
    ("fp32", "llama-13m", "lora"): (1.0, 128),
    ("fp32", "llama-13m", "full"): (1.5, 256),
    ("bf16-mixed", "llama-2m", "lora"): (0.65, 64),
    ("bf16-mixed", "llama-2m", "full"): (0.7, 64),
    ("bf16-mixed", "llama-6m", "lora"): (0.7, 64),
    ("bf16-mixed", "llama-6m", "full"): (0.75, 64),
    ("bf16-mixed", "llama-13m", "lora"): (0.75, 64),
    ("bf16-mixed", "llama-13m", "full"): (0.9, 64),
}
CASES = [Case(model, method, precision, *shape) for (precision, model, method), shape in SHAPES.items()]
QUICK = [case for case in CASES if case.model == "llama-2m" and case.method == "full"]


def prepare(home: Path) -> None:
    """Write the models' folders and the data below `home`, where they are not there yet."""
    for name, changes in MODELS.items():
        folder = home / "models" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(EXAMPLE / file, folder / file)
        config = json.loads((EXAMPLE / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes, indent=2) + "\n")
    if not (home / "data" / "functions.jsonl").exists():
        maker = ROOT / "examples" / "stdlib_data.py"
        subprocess.run([sys.executable, str(maker), "--out", str(home / "data")], check=True, stdout=sys.stderr)
