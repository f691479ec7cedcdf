"""Matrix product rates of this device by number format: what a precision lever can bring at most.

    python -m benchmarks.matmul [--size 1024] [--json FILE]

Formats alternate within each round, so drift hits all alike; the median over the rounds is shown.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

ROUNDS = 15


def seconds(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Seconds of one product of random square matrices, warm."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    left @ right
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    left @ right
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    formats = {"fp32": torch.float32, "bf16": torch.bfloat16}
    seen: dict[str, list[float]] = {name: [] for name in formats}
    for _ in range(3 if options.quick else ROUNDS):
        for name, dtype in formats.items():
            seen[name].append(seconds(device, dtype, options.size))
    rates = {name: 2 * options.size**3 / statistics.median(values) / 1e9 for name, values in seen.items()}
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU ({torch.backends.cpu.get_cpu_capability()})"
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": name,
        "os": platform.platform(),
        "torch": torch.__version__,
        "size": options.size,
        "gflops": rates,
    }
    for kind, rate in rates.items():
        print(f"{kind}: {rate:,.0f} GFLOP/s")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
