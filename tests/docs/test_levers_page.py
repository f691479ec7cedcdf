"""docs/levers.md is what the catalogue says."""

from __future__ import annotations

import runpy

from service.levers import LEVERS
from tests.conftest import ROOT


def test_the_page_is_the_catalogues() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_levers.py"))["text"]()
    assert (ROOT / "docs" / "levers.md").read_text("utf-8") == made, "run: python docs/make_levers.py"
    assert all(f"## {name}\n" in made for name in LEVERS)
