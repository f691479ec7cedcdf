"""The tiny models of tests/child."""

from tests.child.conftest import _process_settings, bert, functions, llama, reviews

__all__ = ["_process_settings", "bert", "functions", "llama", "reviews"]
