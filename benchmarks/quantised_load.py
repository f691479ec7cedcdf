"""Loading a model for QLoRA: quantised as it is loaded, against the quantised weights that a worker keeps.

    python benchmarks/quantised_load.py [--parameters 1.0] [--rounds 3] [--quick] [--json FILE]

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
from typing import Any

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
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    from worker.child import quantised
    from worker.devices import open_device

    device = open_device("cuda" if torch.cuda.is_available() else "cpu")
    device.limit(None)
    before = device.used()
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    asked = quantised.Asked(folder, quantization, "benchmark")
    options: dict[str, Any] = {"config": AutoConfig.from_pretrained(folder), "device_map": {"": device.torch}}
    device.reset_peak()
    started = time.perf_counter()
    _, extra = quantised.load(AutoModelForCausalLM, asked, options | {"dtype": torch.bfloat16}, store)
    device.synchronize()
    seconds = time.perf_counter() - started + min(0.0, extra)  # without what keeping took
    print(json.dumps({"seconds": seconds, "peak_bytes": device.peak() - before}))


def run(folder: Path, store: Path) -> dict[str, float]:
    """A child's answer."""
    command = [sys.executable, "-W", "ignore", __file__, "--child", str(folder), str(store)]
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
