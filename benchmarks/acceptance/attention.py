"""Part `attention`: every kernel, forward and backward, on whole rows, padded rows and packed rows.

All three hold the same number of computed tokens: `whole` rows of one sample each, causal; `padded` rows whose samples
are between a quarter and all of the length, with a mask where the kernel needs one; `packed` rows of four samples,
which must not see each other. Milliseconds of forward plus backward, bf16, 32 query heads, 8 key heads, size 128.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from benchmarks.acceptance.place import Part, Place, Step
from benchmarks.store import Row

LENGTHS = (2048, 4096)
SDPA = ("default", "flash", "efficient", "cudnn", "math")
FLASH = {"flash-2": "flash_attn", "flash-3": "flash_attn_interface"}  # by their packages
KERNELS = (*SDPA, "flex", "varlen", *FLASH)
LAYOUTS = ("whole", "padded", "packed")
SAMPLES_A_ROW = 4
MOST_DENSE = 4096  # the math kernel's scores of longer rows do not fit beside the rest


def child(length: int, tokens: int, heads: int) -> Row:
    """Milliseconds, or a reason, by layout and kernel."""
    import torch

    from benchmarks.acceptance.clock import median_seconds, pick_device

    clock = pick_device()
    device = clock.torch
    rows = max(1, tokens // length)
    torch.manual_seed(0)
    q = torch.randn(rows, heads, length, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    k, v = (
        torch.randn(rows, heads // 4, length, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2)
    )
    found: Row = {}
    for layout in LAYOUTS:
        ends = boundaries(layout, rows, length)
        for kernel in KERNELS:
            try:
                if kernel == "math" and length > MOST_DENSE:
                    raise RuntimeError(f"not tried beyond {MOST_DENSE} tokens")
                forward = attention(kernel, layout, q, k, v, ends)

                gradient = torch.ones_like(forward())

                # Not sum().backward(), whose expanded gradient kernels would copy first; nor are gradients kept.
                def both(forward: Callable[[], torch.Tensor] = forward, gradient: torch.Tensor = gradient) -> None:
                    torch.autograd.grad(forward(), (q, k, v), gradient)

                found[f"{layout}/{kernel}"] = median_seconds(both, clock) * 1e3
            except Exception as error:  # noqa: BLE001 - a kernel that cannot must not cost the others
                found[f"{layout}/{kernel}"] = repr(error)[:160]
    return found


def boundaries(layout: str, rows: int, length: int) -> list[int]:
    """Where samples end in the flattened rows, padding being one too, as the kernel for them wants it."""
    ends = [0]
    for row in range(rows):
        if layout == "packed":
            cuts = [length // SAMPLES_A_ROW * at for at in range(1, SAMPLES_A_ROW)]
        elif layout == "padded":
            cuts = [length - (3 * length // 4) * row // max(1, rows - 1)] if row else []
        else:
            cuts = []
        ends += [row * length + cut for cut in [*cuts, length]]
    return ends


def attention(kernel: str, layout: str, q: Any, k: Any, v: Any, ends: list[int]) -> Callable[[], Any]:
    """The forward pass of a kernel on a layout."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    rows, _, length, _ = q.shape
    device = q.device
    numbers = torch.zeros(rows * length, dtype=torch.long, device=device)
    numbers[torch.tensor(ends[1:-1], device=device)] = 1
    sample = numbers.cumsum(0).view(rows, length)
    bounds = torch.tensor(ends, dtype=torch.int32, device=device)
    most = max(last - first for first, last in zip(ends, ends[1:], strict=False))
    if kernel == "varlen":
        from types import SimpleNamespace

        from training.levers.attention import varlen_attention

        told = {"cu_seq_lens_q": bounds, "max_length_q": most}
        return lambda: varlen_attention(SimpleNamespace(is_causal=True), q, k, v, **told)[0]
    if kernel in FLASH:
        flash = import_module(FLASH[kernel]).flash_attn_varlen_func
        told = {f"cu_seqlens_{side}": bounds for side in "qk"}
        told |= {f"max_seqlen_{side}": most for side in "qk"}

        def flattened() -> Any:
            found = flash(*(one.transpose(1, 2).flatten(0, 1) for one in (q, k, v)), causal=True, **told)
            return found[0] if isinstance(found, tuple) else found  # some releases give the sums of exponentials, too

        return flattened
    if kernel == "flex":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def allowed(row: Any, _head: Any, at: Any, to: Any) -> Any:
            return (at >= to) & (sample[row, at] == sample[row, to])

        mask = create_block_mask(allowed, rows, None, length, length, device=device)
        flex = torch.compile(flex_attention)
        return lambda: flex(q, k, v, block_mask=mask, enable_gqa=True)
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
    mask = None
    if layout != "whole":
        mask = (sample[:, None, :, None] == sample[:, None, None, :]).tril()

    # As transformers does it: with a mask, and for the kernel that has no groups, key and value heads are repeated.
    repeated = mask is not None or kernel == "efficient"
    options = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": not repeated}

    def forward() -> Any:
        keys = [one.repeat_interleave(q.shape[1] // one.shape[1], 1) if repeated else one for one in (k, v)]
        if kernel == "default":
            return torch.nn.functional.scaled_dot_product_attention(q, *keys, **options)
        with sdpa_kernel([backends[kernel]]):
            return torch.nn.functional.scaled_dot_product_attention(q, *keys, **options)

    return forward


def steps(place: Place) -> list[Step]:
    """One step for each length of the samples."""

    def step(length: int) -> Step:
        arguments = (length, place.pick(32_768, 128), place.pick(32, 4))
        return Step(f"attention/{length}", 60, lambda here: here.child("attention", *arguments))

    return [step(length) for length in place.pick(LENGTHS, (64,))]


def show(_: Place, rows: dict[str, Row]) -> list[str]:
    """Milliseconds by length; a kernel that cannot is a dash, its reason is in the JSON."""
    lines = [f"{'tokens':>6} {'rows':8}" + "".join(f"{kernel:>10}" for kernel in KERNELS) + "   (ms, forward+backward)"]
    for key, row in rows.items():
        if "reason" in row:
            continue
        for layout in LAYOUTS:
            times = [row[f"{layout}/{kernel}"] for kernel in KERNELS]
            figures = "".join(f"{'-' if isinstance(one, str) else f'{one:.2f}':>10}" for one in times)
            lines.append(f"{key.rpartition('/')[2]:>6} {layout:8}{figures}")
    return lines


PART = Part("attention", steps, show)
