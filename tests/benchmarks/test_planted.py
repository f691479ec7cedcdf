"""The lever of planted faults is one that the catalogue takes, with each fault and with none."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks.planted.cases import BAD, IDLE, PLANTED
from service.levers import CIRCUMSTANCES, LEVERS
from service.levers.base import Lever
from service.levers.checks import mistakes
from tests.conftest import ROOT

FILE = ROOT / "benchmarks" / "planted" / "service_levers" / "planted.py"


def lever(file: Path) -> Lever:
    """The LEVER of a file, which is read anew."""
    spec = importlib.util.spec_from_file_location("planted", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Lever = module.LEVER
    return found


@pytest.mark.parametrize("fault", [None, IDLE.fault, *(one.fault for one in BAD)])
def test_the_catalogue_takes_it(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault is None:
        monkeypatch.delenv(PLANTED, raising=False)
    else:
        monkeypatch.setenv(PLANTED, fault)
    assert mistakes({**LEVERS, "planted": lever(FILE)}, CIRCUMSTANCES) == []
