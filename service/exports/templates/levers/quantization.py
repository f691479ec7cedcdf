"""How the frozen base is quantised."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def quantised_by_bitsandbytes(whole: list[str] | None, compute: Any, **options: Any) -> Any:
    """transformers' BitsAndBytesConfig; its own defaults are fp4 and fp32 compute. Modules in `whole` are left out."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(llm_int8_skip_modules=whole, bnb_4bit_compute_dtype=compute, **options)


def quantised_by_torchao(whole: list[str] | None, compute: Any, name: str) -> Any:
    """transformers' TorchAoConfig around one of torchao.quantization's; it computes in whatever format comes in.

    torchao would also set the compiler and float32 matmuls as it sees fit.
    """
    from transformers import TorchAoConfig

    del compute
    made = getattr(import_module("torchao.quantization"), name)(set_inductor_config=False)
    return TorchAoConfig(made, modules_to_not_convert=whole)
