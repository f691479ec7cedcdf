"""Tiny random models and data, made once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import masking_utils, modeling_flash_attention_utils

from tests.child import tiny
from tests.conftest import ROOT
from worker.child import build

SDPA = ("flash", "mem_efficient", "cudnn", "math")
# As they are before any bundle: one of a whole module may be built before a test's own settings are made.
PACKING = (masking_utils.find_packed_sequence_indices, modeling_flash_attention_utils._is_packed_sequence)


@pytest.fixture(autouse=True)
def _process_settings() -> Iterator[None]:
    """One thread: more only spin on models this small.

    A bundle sets that, the fp32 precision, sdpa's kernels, and whether transformers takes rows for packed.
    """
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    kernels = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in SDPA}
    masking_utils.find_packed_sequence_indices, modeling_flash_attention_utils._is_packed_sequence = PACKING
    torch.set_num_threads(1)
    yield
    left_open = _get_current_dispatch_mode_stack()
    for name, on in kernels.items():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(on)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    assert not left_open, "a simulated device was not closed: it would slow all that this process does later"


@pytest.fixture(autouse=True)
def _tokenizers_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial loads one tokenizer in its process. Here a thousand load the same ones, each from a megabyte of JSON."""
    monkeypatch.setattr(build, "tokenizer_of", tiny.tokenizer_of)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama's folder."""
    return tiny.save("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT classifier's folder."""
    return tiny.save("bert", tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="session")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 prompts and completions."""
    return tiny.write(tmp_path_factory.mktemp("data") / "functions.jsonl", tiny.pairs(48))


@pytest.fixture(scope="session")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 texts with labels."""
    return tiny.write(tmp_path_factory.mktemp("data") / "reviews.jsonl", tiny.classes(48))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The example's tokenizer, with a chat template that refuses robots."""
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(ROOT / "examples" / "llama-13m")
    made.chat_template = (
        "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return made
