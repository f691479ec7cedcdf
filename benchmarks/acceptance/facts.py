"""Part `facts`: driver and versions, which attention backends run here, and what a first call at a new shape takes."""

from __future__ import annotations

import time

from benchmarks.acceptance.place import Part, Place, Step
from benchmarks.store import Row

BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
NEW_SHAPES = (3, 5, 7)  # times the base length, each called for the first time


def child(length: int) -> Row:
    """Which backends take a causal bf16 attention; milliseconds of first and second calls of a layer's operations."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from benchmarks.acceptance.clock import pick_device

    clock = pick_device()
    device = clock.torch
    found: Row = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    heads = torch.randn(1, 4, length, 64, device=device, dtype=torch.bfloat16)
    for name in BACKENDS:
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            found[name.lower()] = True
        except RuntimeError:
            found[name.lower()] = False
    layer = torch.nn.TransformerEncoderLayer(256, 4, batch_first=True).to(device, torch.bfloat16)
    for times in NEW_SHAPES:
        x = torch.randn(1, times * length, 256, device=device, dtype=torch.bfloat16)
        calls = []
        for _ in range(2):
            clock.synchronize()
            started = time.perf_counter()
            layer(x).sum().backward()
            clock.synchronize()
            calls.append((time.perf_counter() - started) * 1e3)
        found[f"first_ms/{times * length}"], found[f"second_ms/{times * length}"] = calls
    return found


def steps(place: Place) -> list[Step]:
    """One."""
    return [Step("facts/device", 35, lambda here: here.child("facts", place.pick(512, 16)))]


def show(_: Place, rows: dict[str, Row]) -> list[str]:
    """The backends, and how much longer first calls take."""
    row = rows.get("facts/device", {})
    if "torch" not in row:
        return []
    backends = ", ".join(name.lower() for name in BACKENDS if row[name.lower()])
    first = [(row[key], row[key.replace("first", "second")]) for key in row if key.startswith("first_ms/")]
    slower = ", ".join(f"{one:.1f} then {two:.1f} ms" for one, two in first)
    return [
        f"torch {row['torch']}, CUDA {row['cuda']}, cuDNN {row['cudnn']}; attention by {backends}",
        f"new shapes: {slower}",
    ]


PART = Part("facts", steps, show)
