"""Tiny models as those of tests/child, with fewer tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.child import tiny
from tests.child.conftest import _process_settings, _tokenizers_are_loaded_once, functions, reviews


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama's folder."""
    return tiny.save("llama", tmp_path_factory.mktemp("models") / "llama", vocabulary=tiny.FEW)


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT classifier's folder."""
    return tiny.save("bert", tmp_path_factory.mktemp("models") / "bert", vocabulary=tiny.FEW)


@pytest.fixture(autouse=True)
def _compiled_code_is_of_one_test() -> Iterator[None]:
    """What a trial compiles counts in its own process only; here, models of many tests share one."""
    yield
    if torch._dynamo.config.fail_on_recompile_limit_hit:
        torch._dynamo.reset()
        torch._dynamo.config.fail_on_recompile_limit_hit = False


__all__ = ["_process_settings", "_tokenizers_are_loaded_once", "functions", "reviews"]
