"""Lets the processes of a test run share what takes long to make."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """What `make` answers, as JSON: one of the run's processes calls it, and the others wait for its answer.

    A fixture of a module or session is otherwise made anew in every process that runs one of its tests. The way is
    that of pytest-xdist's documentation ("making session-scoped fixtures execute only once"). A `make` that fails is
    called again by the next process, so that each of the tests that need it fails.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return make()
    file = factory.getbasetemp().parent / f"{name}.json"  # the folder that is the same for all processes of one run
    with FileLock(f"{file}.lock"):
        if not file.exists():
            file.write_text(json.dumps(make()))
        return json.loads(file.read_text())
