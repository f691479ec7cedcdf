"""docs/exports.md is what the exports say."""

from __future__ import annotations

import runpy

from service.exports import EXPORTS
from service.levers import LEVERS
from tests.conftest import ROOT


def test_the_page_is_the_exports() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_exports.py"))["text"]()
    assert (ROOT / "docs" / "exports.md").read_text("utf-8") == made, "run: python docs/make_exports.py"
    assert all(f"| {lever.name}={choice} |" in made for lever in LEVERS.values() for choice in lever.names)
    assert all(f"## {export.target.title}\n" in made for export in EXPORTS.values() if export.target)
