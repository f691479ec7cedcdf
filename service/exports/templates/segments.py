"""Where samples end, for attention kernels that keep them apart without a mask."""

from __future__ import annotations

from typing import Any

import torch

from service.exports.templates.common import Sample

# Kernels that are told by the batch; `varlen` has no other way, the others have masks where rows are padded.
TOLD = ("varlen", "flash_attention_2", "flash_attention_3")


def segments(rows: list[list[Sample]], width: int) -> dict[str, Any]:
    """`cu_seq_lens_q`, `cu_seq_lens_k` (int32, [samples + 1]), `max_length_q` and `max_length_k` of padded rows.

    The rows are flattened, and each row's padding is a sample of its own.
    """
    lengths = []
    for row in rows:
        lengths += [len(ids) for ids, _ in row]
        if rest := width - sum(len(ids) for ids, _ in row):
            lengths.append(rest)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def moved(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch with its tensors on the device; numbers stay numbers."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def pinned(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with its tensors in pinned memory."""
    return {name: value.pin_memory() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
