"""Rows of samples as tensors, and where samples end, for attention kernels that keep them apart without a mask."""

from __future__ import annotations

from array import array
from typing import Any

import torch

from service.exports.templates.common import IGNORED, Batch, Sample

# Kernels that are told by the batch; `varlen` has no other way, the others have masks where rows are padded.
TOLD = ("varlen", "flash_attention_2", "flash_attention_3")


def rows_of(rows: list[list[Sample]], pad: int, width: int = 0) -> Batch:
    """input_ids, labels, attention_mask and position_ids [rows, longest or `width`] of rows of samples.

    Positions restart at each sample, padding being a sample of its own. A class as label is repeated along its row.
    """
    width = max(width, *(sum(len(ids) for ids, _ in row) for row in rows))
    places = array("q", range(width))
    padding, ignored, one, zero = (array("q", [value]) * width for value in (pad, IGNORED, 1, 0))
    names = ("input_ids", "labels", "attention_mask", "position_ids")
    ids, labels, attended, positions = flat = [array("q") for _ in names]  # ten times as fast as tensors' own slices
    for row in rows:
        used = 0
        for sample, target in row:
            used += len(sample)
            ids.extend(sample)
            labels.extend(target if len(target) == len(sample) else target[:1] * len(sample))
            positions.extend(places[: len(sample)])
        rest = width - used
        ids.extend(padding[:rest])
        labels.extend(ignored[:rest])
        attended.extend(one[:used] + zero[:rest])
        positions.extend(places[:rest])
    tensors = [torch.frombuffer(values, dtype=torch.long).view(len(rows), width) for values in flat]
    return dict(zip(names, tensors, strict=True))


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


def offset_positions(model: Any) -> None:
    """Where the positions of a model begin after its padding id, as RoBERTa's do, shift those that it is given."""
    tables = [one for name, one in model.named_modules() if name.endswith("position_embeddings")]
    first = next((table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None), 0)
    if first:
        model.register_forward_pre_hook(
            lambda _, args, inputs: (
                (args, inputs | {"position_ids": inputs["position_ids"] + first}) if "position_ids" in inputs else None
            ),
            with_kwargs=True,
        )
