"""Part `peak`: what the device computes and copies at best, so that a speed has something to be held against."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.acceptance.place import Part, Place, Step
from benchmarks.store import Row

if TYPE_CHECKING:
    from worker.devices import Device

SECONDS = 10.0  # of products without a pause


def child(size: int, seconds: float) -> Row:
    """bf16 products of random square matrices in TFLOP/s; copies in TB/s, bytes read plus bytes written.

    Products go on for so many seconds, as a GPU lowers its clock after some: that is what a training reaches at best.
    """
    import torch

    from benchmarks.acceptance.clock import median_seconds, pick_device

    clock = pick_device()
    device = clock.torch
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(4 * size, size, device=device)
    target = torch.empty_like(source)
    product, slowed = sustained(lambda: a @ b, clock, seconds)
    copied = median_seconds(lambda: target.copy_(source), clock)
    return {
        "slowed_by": slowed,
        "tflops": 2 * size**3 / product / 1e12,
        "copy_tb_s": 2 * source.nbytes / copied / 1e12,
        "size": size,
    }


def sustained(function: Callable[[], Any], device: Device, seconds: float) -> tuple[float, list[str]]:
    """(mean seconds of a call over that many seconds without a pause, why the clock was lowered meanwhile)."""
    from benchmarks.acceptance.clock import median_seconds

    each, slowed, calls, total = median_seconds(function, device), set[str](), 0, 0.0
    while total < seconds:
        count = max(1, int(min(seconds, 1.0) / each))
        first = device.mark()
        for _ in range(count):
            function()
        last = device.mark()
        device.synchronize()
        total, calls = total + device.between(first, last), calls + count
        clock = device.clock(device.neighbours())
        slowed |= set(clock[1] if clock else ())
    return total / calls, sorted(slowed)


def steps(_: Place) -> list[Step]:
    """One."""
    return [Step("peak/matmul", 25, lambda place: place.child("peak", place.pick(8192, 128), place.pick(SECONDS, 0.1)))]


def show(place: Place, rows: dict[str, Row]) -> list[str]:
    """One line."""
    row = rows.get("peak/matmul", {})
    if "tflops" not in row:
        return []
    nominal = place.peak_flops().get("nominal")
    sheet = f", {row['tflops'] / nominal * 1e12:.0%} of the data sheet's" if nominal else ""
    slowed = f"; the clock was lowered: {', '.join(row['slowed_by'])}" if row.get("slowed_by") else ""
    product = f"bf16 product of {row['size']}: {row['tflops']:.3g} TFLOP/s{sheet}{slowed}"
    return [f"{product}; copy {row['copy_tb_s']:.3g} TB/s"]


PART = Part("peak", steps, show)
