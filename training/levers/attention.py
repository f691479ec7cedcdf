"""Attention kernels: sdpa's backends, and torch's variable-length kernel."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import torch


def sdpa_backends(flash: bool = False, mem_efficient: bool = False, cudnn: bool = False) -> None:
    """Switch sdpa's backends for the whole process; the math backend stays on, for what the others do not take."""
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_mem_efficient_sdp(mem_efficient)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.backends.cuda.enable_math_sdp(True)
    if mem_efficient:  # it needs as many heads of keys as of queries, or sdpa takes plain matmuls
        from transformers.integrations import sdpa_attention

        sdpa_attention.use_gqa_in_sdpa = lambda *_: False


def register_varlen() -> None:
    """Register `varlen` as an attention of transformers. It takes no mask; the batch tells where samples end."""
    from transformers import AttentionInterface

    AttentionInterface.register("varlen", varlen_attention)


class NotTold(ValueError):
    """A model's layers do not pass on to attention where the samples end."""


def varlen_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within each sample; [rows, heads, tokens, size] in, [rows, tokens, heads, size] out.

    `cu_seq_lens_q` are the bounds of all samples in the flattened rows (padding counts as a sample), `max_length_q` is
    the longest's length. NotTold without them, and ValueError for attention dropout, which the kernel does not have.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise NotTold("varlen attention needs cu_seq_lens_q and max_length_q")
    if dropout:
        raise ValueError("varlen attention has no dropout; set attention_dropout to 0 in the model's config.json")
    rows, heads, tokens, size = query.shape
    q, k, v = (one.transpose(1, 2).reshape(rows * tokens, -1, size) for one in (query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    reach = sliding_window - 1 if sliding_window else -1
    window = (reach, 0 if causal else reach)
    if q.is_cuda and torch.cuda.get_device_capability(q.device) >= (8, 0):  # the kernel is FlashAttention 2
        out = _kernel(q, k, v, cu_seq_lens_q, max_length_q, scaling, window)
    else:
        out = _by_sample(q, k, v, cu_seq_lens_q, scaling, window)
    return out.reshape(rows, tokens, heads, size), None


def _kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    scaling: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    """torch's varlen_attn, for 16-bit tensors only; its arguments differ between torch 2.10 and 2.13."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"scale": scaling} if "scale" in known else {}
    if "window_size" in known:
        options["window_size"] = window
    elif window[0] == -1:
        options["is_causal"] = window[1] == 0
    else:
        raise ValueError("this torch's varlen_attn has no sliding window; it needs torch 2.11")
    if scaling is not None and "scale" not in known:
        q = q * (scaling * q.shape[-1] ** 0.5)
    if "enable_gqa" in known:
        options["enable_gqa"] = k.shape[1] != q.shape[1]
    elif k.shape[1] != q.shape[1]:
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], dim=1) for one in (k, v))
    kind = q.dtype if q.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
    found: torch.Tensor = varlen_attn(q.to(kind), k.to(kind), v.to(kind), ends, ends, longest, longest, **options)
    return found.to(q.dtype)


def _by_sample(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends: torch.Tensor,
    scaling: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    """The same attention by sdpa, one sample after another: exact, slow, and for devices without the kernel."""
    parts = []
    bounds = ends.tolist()
    for start, end in pairwise(bounds):
        one = [part[start:end].transpose(0, 1).unsqueeze(0) for part in (q, k, v)]
        places = torch.arange(end - start, device=q.device)
        away = places[:, None] - places[None, :]
        mask = torch.ones_like(away, dtype=torch.bool)
        if window[1] == 0:
            mask &= away >= 0
        if window[0] >= 0:
            mask &= away.abs() <= window[0]
        out = torch.nn.functional.scaled_dot_product_attention(
            *one, attn_mask=mask, scale=scaling, enable_gqa=k.shape[1] != q.shape[1]
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)
