"""The tiny models of tests/child, for tests of the runner that train them."""

from tests.child.conftest import functions, llama

__all__ = ["functions", "llama"]
