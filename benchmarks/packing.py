"""How full rows are, and how fast, by every arrangement of samples: padded, sorted, packed, side by side.

    python -m benchmarks.packing [--data FILE ...] [--model FOLDER] [--length 512] [--blocks 3] [--quick] [--json FILE]

Without --data it is the demo's functions.jsonl. A fill is the share of computed tokens that are not padding, over the
whole dataset. Speeds come from interleaved blocks over the same samples, each in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from service.contract.child import Result, RunBlock, Workplace
from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Outcome
from service.devices import device_facts
from service.levers import LEVERS
from worker.child.sources import CHATML
from worker.runner.main import environment
from worker.runner.measuring import Bench
from worker.runner.sandbox import Sandbox

ROOT = Path(__file__).parent.parent
EFFECTIVE = 32
# Batching, attention, micro batch (samples, rows of max_length, or rows of the longest): equal tokens at the longest.
ARRANGEMENTS: dict[str, tuple[dict[str, str], int]] = {
    "padded": ({"batching": "padded"}, 4),
    "sorted": ({"batching": "sorted"}, 4),
    "token-budget": ({"batching": "token-budget"}, 4),
    "grouped": ({"batching": "grouped"}, 4),
    "packed": ({"batching": "packed"}, 4),
    "packed-global": ({"batching": "packed-global"}, 4),
    "padding-free": ({"batching": "padding-free", "attention": "varlen"}, 4),
}


def candidate(levers: dict[str, str], micro: int) -> Measurement:
    """What a block needs to know."""
    chosen = {name: lever.baseline for name, lever in LEVERS.items()} | {"precision": "fp32"} | levers
    made = Configuration(
        method="lora", levers=chosen, effective_batch_size=EFFECTIVE, learning_rate=1e-4, micro_batch_size=micro
    )
    return Measurement(configuration=made, outcome=Outcome.ok, micro_batch_size=micro)


def with_chat(model: Path, home: Path) -> Path:
    """The model's folder, with ChatML where its tokenizer has no template of its own."""
    told = json.loads((model / "tokenizer_config.json").read_text())
    if "chat_template" in told or (model / "chat_template.jinja").exists():
        return model
    made = Path(shutil.copytree(model, home / "model"))
    (made / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": CHATML}))
    return made


def fills(spec: JobSpec, roots: tuple[Path, ...]) -> dict[str, float]:
    """Non-padding over computed tokens of an epoch, by arrangement."""
    from training.batches import arranged
    from training.source import tokenizer_of
    from worker.child import sources
    from worker.child.arrange import padded_shape
    from worker.child.build import recipe_of
    from worker.child.data import load

    place = Workplace(device="cpu", data_roots=roots, hub_cache=roots[0])
    made = {name: candidate(*arrangement).configuration for name, arrangement in ARRANGEMENTS.items()}
    read = recipe_of(spec, made["padded"])
    data = load(spec, read, tokenizer_of(sources.model_folder(spec.model, place), read), place)
    order = list(range(len(data.lengths)))
    random.Random(0).shuffle(order)
    found = {}
    for name, configuration in made.items():
        recipe = replace(recipe_of(spec, configuration, data.facts), micro_batch_size=ARRANGEMENTS[name][1])
        plan = arranged(order, data.lengths, spec.training.seed, recipe)
        shapes = [padded_shape(batch, data.lengths) for step in plan for batch in step]
        found[name] = sum(data.lengths) / sum(rows * width for rows, width in shapes)
    return found


def speeds(spec: JobSpec, bench: Bench, blocks: int) -> dict[str, list[float]]:
    """Non-padding tokens/s of every arrangement in every block."""
    seen: dict[str, list[float]] = {name: [] for name in ARRANGEMENTS}
    rng = random.Random(0)
    for number in range(blocks):
        for name in rng.sample(list(ARRANGEMENTS), len(ARRANGEMENTS)):
            place, made = bench.workplace_of(spec.name), candidate(*ARRANGEMENTS[name])
            asked = RunBlock(workplace=place, spec=spec, candidate=made, block=number, seed=number)
            ending = bench.sandbox.run(asked, 900, lambda _: None, lambda: False)
            if not isinstance(ending.last, Result):
                raise SystemExit(f"{name}: {ending.kind}: {ending.reason}")
            assert ending.last.block is not None and ending.last.block.timing is not None
            timing = ending.last.block.timing
            seen[name].append(timing.tokens / timing.seconds)
    return seen


def compared(file: Path, options: argparse.Namespace, facts: HardwareFacts, home: Path) -> dict[str, Any]:
    """All arrangements of a file's samples, printed."""
    model = with_chat(options.model.resolve(), home)
    roots = (file.parent, model, home, ROOT)
    spec = JobSpec.model_validate(
        {
            "name": file.stem,
            "model": {"source": str(model), "weights": "random"},
            "dataset": {"source": str(file), "max_length": options.length},
            "training": {"effective_batch_size": EFFECTIVE},
            "search": {"verify": "quick"},
        }
    )
    bench = Bench(
        Sandbox(facts.has_own_memory, capability=facts.capability),
        facts,
        home,
        Workplace(device=facts.device, index=facts.index, data_roots=roots, hub_cache=home / "hub"),
    )
    full = fills(spec, roots)
    seen = speeds(spec, bench, 1 if options.quick else options.blocks)
    medians = {name: statistics.median(values) for name, values in seen.items()}
    print(f"\n{file.name:24} {'fill':>7} {'tokens/s':>9} {'of padded':>9}")
    for name, speed in sorted(medians.items(), key=lambda one: -one[1]):
        print(f"{name:24} {full[name]:7.1%} {speed:9,.0f} {speed / medians['padded']:8.2f}x")
    return {"fill": full, "tokens_per_second": seen, "medians": medians}


def main() -> None:
    """Run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, nargs="+", default=[ROOT / "examples" / "data" / "functions.jsonl"])
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "llama-13m")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fills, and one block")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.update(environment())
    facts = device_facts()[0]
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"name": facts.name, "cores": facts.cores, "os": platform.platform(), "versions": facts.versions},
        "length": options.length,
        "data": {},
    }
    print(f"{facts.name}, {result['date']}, rows of {options.length} tokens")
    for file in options.data:
        with tempfile.TemporaryDirectory(prefix="dynotune-packing-") as scratch:
            result["data"][file.name] = compared(file.resolve(), options, facts, Path(scratch))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
