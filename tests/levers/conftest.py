"""The tiny models of tests/trial."""

from tests.trial.conftest import _process_settings, bert, functions, llama, reviews

__all__ = ["_process_settings", "bert", "functions", "llama", "reviews"]
