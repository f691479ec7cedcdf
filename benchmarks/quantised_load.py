"""Loading a model for QLoRA: quantised as it is loaded, against the quantised weights that a worker keeps.

    python -m benchmarks.quantised_load [--parameters 1.0] [--rounds 3] [--quick] [--json FILE]

A Llama of so many billion parameters is drawn in bf16 and saved; each load is a fresh process, the two ways in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from service.contract.configuration import Configuration
from service.contract.job import JobSpec
from service.levers import LEVERS

LAYER = 4 * 2048 * 2048 + 3 * 2048 * 8192  # parameters of a layer
SHAPE = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "vocab_size": 32000}


def draw(folder: Path, billions: float) -> int:
    """Save a random model in bf16; its parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = max(1, round(billions * 1e9 / LAYER))
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=layers, dtype="bfloat16")).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def child(folder: Path, store: Path) -> None:
    """Load once, and say how long it took, and the peak of memory above what was there before."""
    import torch
    from transformers import AutoConfig

    from worker.child import quantised
    from worker.child.build import recipe_of
    from worker.devices import open_device

    device = open_device("cuda" if torch.cuda.is_available() else "cpu")
    device.limit(None)
    before = device.used()
    recipe, config = recipe_of(*job(folder)), AutoConfig.from_pretrained(folder)
    device.reset_peak()
    started = time.perf_counter()
    _, extra = quantised.load(folder, config, device.torch, recipe, store)
    device.synchronize()
    seconds = time.perf_counter() - started + min(0.0, extra)  # without what keeping took
    print(json.dumps({"seconds": seconds, "peak_bytes": device.peak() - before}))


def job(folder: Path) -> tuple[JobSpec, Configuration]:
    """QLoRA on the model in bf16, the base in NF4 with double quantisation. No data are read."""
    spec = JobSpec.model_validate(
        {"model": {"source": str(folder)}, "dataset": {"source": "none.jsonl"}, "method": "qlora"}
    )
    levers = {name: lever.baseline for name, lever in LEVERS.items()}
    levers |= {"precision": "bf16-mixed", "quantization": "nf4-double"}
    made = Configuration(method="qlora", levers=levers, effective_batch_size=1, learning_rate=1e-4)
    return spec, made


def run(folder: Path, store: Path) -> dict[str, float]:
    """A child's answer."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.quantised_load", "--child", str(folder), str(store)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parameters", type=float, default=1.0, help="billions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small model, one round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(*options.child)
    billions, rounds = (0.1, 1) if options.quick else (options.parameters, options.rounds)
    seen: dict[str, list[dict[str, float]]] = {"quantised at load": [], "kept": []}
    with tempfile.TemporaryDirectory(prefix="dynotune-load-") as scratch:
        folder = Path(scratch) / "model"
        parameters = draw(folder, billions)
        for number in range(rounds):
            store = Path(scratch) / f"kept{number}"
            for name in seen:
                seen[name].append(run(folder, store))
    medians = {
        name: {key: statistics.median(one[key] for one in rows) for key in ("seconds", "peak_bytes")}
        for name, rows in seen.items()
    }
    print(f"{parameters / 1e9:.2f} billion parameters, {rounds} rounds, {time.strftime('%Y-%m-%d')}")
    for name, one in medians.items():
        print(f"{name:18} {one['seconds']:7.2f} s  peak {one['peak_bytes'] / 2**30:5.2f} GiB")
    ratio = medians["quantised at load"]["seconds"] / medians["kept"]["seconds"]
    print(f"kept weights load {ratio:.1f}x faster (3x wanted)")
    if options.json:
        machine = {"os": platform.platform(), "cores": len(os.sched_getaffinity(0))}
        result = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "parameters": parameters, "runs": seen}
        options.json.write_text(json.dumps(result | {"medians": medians, "ratio": ratio}, indent=2) + "\n")
    return None


if __name__ == "__main__":
    main()
