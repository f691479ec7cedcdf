"""What a model has to know of packed rows: that they are packed, and where its own positions begin."""

from __future__ import annotations

from typing import Any

import torch


def know_single_rows() -> None:
    """Tell transformers that no row holds several samples, in the whole process, for batches without a mask.

    It would otherwise read that from the position ids, once a micro batch for a mask and once a layer for
    FlashAttention, and each time the host would wait for the GPU.
    """
    from transformers import masking_utils, modeling_flash_attention_utils

    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    modeling_flash_attention_utils._is_packed_sequence = lambda position_ids, batch_size: False


def know_packed_rows() -> None:
    """Tell transformers, in the whole process, that rows hold several samples; finding out would wait for the GPU."""
    from transformers import masking_utils

    def sequence_indices(position_ids: torch.Tensor) -> torch.Tensor:
        """Which of its row's samples each token belongs to, [rows, tokens]."""
        return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)

    masking_utils.find_packed_sequence_indices = sequence_indices


def offset_positions(model: Any) -> None:
    """Shift the position ids of packed rows, which begin at 0, for models whose own begin later, such as RoBERTa."""
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    first = next((table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None), 0)

    def shifted(_: Any, arguments: Any, inputs: dict[str, Any]) -> Any:
        if "position_ids" not in inputs:
            return None
        return arguments, inputs | {"position_ids": inputs["position_ids"] + first}

    if first:
        model.register_forward_pre_hook(shifted, with_kwargs=True)
