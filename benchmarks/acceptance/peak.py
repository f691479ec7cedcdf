"""Part `peak`: what the device computes and copies at best, so that a speed has something to be held against."""

from __future__ import annotations

import json
import sys

from benchmarks.acceptance.place import Part, Place, Step
from benchmarks.store import Row


def child(size: int) -> Row:
    """bf16 products of random square matrices in TFLOP/s; copies in TB/s, bytes read plus bytes written."""
    import torch

    from benchmarks.acceptance.clock import median_seconds, pick_device

    clock = pick_device()
    device = clock.torch
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(4 * size, size, device=device)
    target = torch.empty_like(source)
    product = median_seconds(lambda: a @ b, clock)
    copied = median_seconds(lambda: target.copy_(source), clock)
    return {"tflops": 2 * size**3 / product / 1e12, "copy_tb_s": 2 * source.nbytes / copied / 1e12, "size": size}


def steps(_: Place) -> list[Step]:
    """One."""
    return [Step("peak/matmul", 45, lambda place: place.child("peak", place.pick(8192, 128)))]


def show(place: Place, rows: dict[str, Row]) -> list[str]:
    """One line."""
    row = rows.get("peak/matmul", {})
    if "tflops" not in row:
        return []
    nominal = place.peak_flops().get("nominal")
    sheet = f", {row['tflops'] / nominal * 1e12:.0%} of the data sheet's" if nominal else ""
    return [f"bf16 product of {row['size']}: {row['tflops']:.3g} TFLOP/s{sheet}; copy {row['copy_tb_s']:.3g} TB/s"]


PART = Part("peak", steps, show)

if __name__ == "__main__":
    print(json.dumps(child(int(sys.argv[1]))))
