"""How the frozen base is quantised."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def quantised_by_bitsandbytes(whole: list[str] | None, compute: Any, **options: Any) -> Any:
    """transformers' BitsAndBytesConfig, whose defaults are fp4 and fp32 compute. Modules in `whole` are left out."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(llm_int8_skip_modules=whole, bnb_4bit_compute_dtype=compute, **options)


def quantised_by_torchao(whole: list[str] | None, compute: Any, name: str) -> Any:
    """transformers' TorchAoConfig with a config of torchao.quantization by name; it computes in its input's dtype.

    `set_inductor_config=False` keeps torchao from changing the settings of the compiler and of float32 matmuls.
    """
    from transformers import TorchAoConfig

    del compute
    made = getattr(import_module("torchao.quantization"), name)(set_inductor_config=False)
    return TorchAoConfig(made, modules_to_not_convert=whole)
