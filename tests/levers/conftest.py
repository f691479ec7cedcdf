"""The tiny models of tests/child."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.child.conftest import _process_settings, _tokenizers_are_loaded_once, bert, functions, llama, reviews


@pytest.fixture(autouse=True)
def _compiled_code_is_of_one_test() -> Iterator[None]:
    """What a trial compiles counts in its own process only; here, models of many tests share one."""
    yield
    if torch._dynamo.config.fail_on_recompile_limit_hit:
        torch._dynamo.reset()
        torch._dynamo.config.fail_on_recompile_limit_hit = False


__all__ = ["_process_settings", "_tokenizers_are_loaded_once", "bert", "functions", "llama", "reviews"]
