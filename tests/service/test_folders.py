"""A folder's files are its list: two of one name and a misspelt constant are told, and not passed over."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import service.cli.launchers
import service.exports
import service.levers
import service.tasks
import worker.devices
from worker.plan.proposers import proposers

LISTS: list[tuple[Any, str, Callable[[], Any]]] = [
    (service.levers, "LEVER", service.levers.discover),
    (service.tasks, "TASK", service.tasks.discover),
    (service.exports, "EXPORT", service.exports.discover),
    (service.cli.launchers, "LAUNCH", service.cli.launchers.discover),
    (worker.devices, "DEVICE", worker.devices.discover),
    (sys.modules["worker.plan.proposers"], "PROPOSER", proposers),
]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any, str], Path]]:
    """Adds a file `extra.py` with that text to a package, for the length of a test."""
    added: list[Any] = []

    def make(package: Any, text: str) -> Path:
        file = tmp_path / "extra.py"
        file.write_text(text, encoding="utf-8")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        importlib.invalidate_caches()
        added.append(package)
        return file

    yield make
    for package in added:
        sys.modules.pop(f"{package.__name__}.extra", None)
        vars(package).pop("extra", None)


@pytest.mark.parametrize(("package", "constant", "discover"), LISTS, ids=[constant for _, constant, _ in LISTS])
def test_a_file_without_the_constant_is_named(
    package: Any, constant: str, discover: Callable[[], Any], add: Callable[[Any, str], Path]
) -> None:
    file = add(package, f"{constant}S = None\n")
    with pytest.raises(ValueError, match=f"{file} declares no {constant},"):
        discover()


def test_what_begins_with_an_underscore_declares_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a folder's own share, beside the helpers that its package names."""
    (tmp_path / "_shared.py").write_text("")
    monkeypatch.setattr(service.tasks, "__path__", [*service.tasks.__path__, str(tmp_path)])
    assert service.tasks.discover() == service.tasks.TASKS


def test_a_file_that_another_folder_hides_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python imports the first of two modules of one name, whatever the second declares."""
    (tmp_path / "causal_lm.py").write_text("TASK = None\n")
    monkeypatch.setattr(service.tasks, "__path__", [*service.tasks.__path__, str(tmp_path)])
    with pytest.raises(ValueError, match=r"two folders of service.tasks have a file causal_lm.py"):
        service.tasks.discover()


@pytest.mark.parametrize(
    ("package", "discover", "text"),
    [
        (service.levers, service.levers.discover, "from service.levers.cache import LEVER"),
        (service.tasks, service.tasks.discover, "from service.tasks.causal_lm import TASK"),
        (service.exports, service.exports.discover, "from service.exports.trl import EXPORT"),
        (worker.devices, worker.devices.discover, "from worker.devices.cpu import DEVICE"),
        (LISTS[-1][0], LISTS[-1][2], "from worker.plan.proposers.search import PROPOSER"),
    ],
    ids=["lever", "task", "export", "device", "proposer"],
)
def test_two_of_one_name_are_both_named(
    package: Any, discover: Callable[[], Any], text: str, add: Callable[[Any, str], Path]
) -> None:
    """The later one would have silently taken the other's place."""
    file, other = add(package, f"{text}\n"), text.split()[1].rpartition(".")[2]
    with pytest.raises(ValueError, match=rf"/{other}\.py and {file} both declare a "):
        discover()


@pytest.mark.parametrize("package", [service.exports, worker.devices])
def test_helpers_are_files_that_are_there(package: Any) -> None:
    assert set(package.HELPERS) <= {file.name for file in pkgutil.iter_modules(package.__path__)}
