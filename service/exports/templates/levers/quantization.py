"""How the frozen base is quantised."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def quantised_by_bitsandbytes(whole: list[str] | None, compute: Any, **options: Any) -> Any:
    """transformers' BitsAndBytesConfig; its own defaults are fp4 and fp32 compute. Modules in `whole` are left out."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(llm_int8_skip_modules=whole, bnb_4bit_compute_dtype=compute, **options)


def quantised_by_torchao(whole: list[str] | None, compute: Any, name: str) -> Any:
    """transformers' TorchAoConfig around one of torchao.quantization's; it computes in whatever format comes in."""
    from transformers import TorchAoConfig

    del compute
    return TorchAoConfig(getattr(import_module("torchao.quantization"), name)(), modules_to_not_convert=whole)
