"""Fixtures: both databases, a job, hardware facts. One PostgreSQL server a test process, one database a test."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from service.contract.hardware import HardwareFacts, Package
from service.contract.job import JobSpec
from service.db import connect, upgrade
from service.queue import Queue
from tests import postgres

ROOT = Path(__file__).parent.parent
TEMPLATE = "dynotune_template"
_numbers = itertools.count()
# Before torch is imported, here and in what the tests start: threads that wait must not use the cores that others need.
# It is what a worker sets for its trials, and most of the time that the tests of training would take.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The tests' own tensors are tiny: two threads take longer for them than one, and each core has a pytest process.
# Trials and exported scripts set their number of threads themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    """Nothing that is imported while tests are collected is garbage, so nothing looks for any."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` looks for tests that run alone in tests/e2e, so that their run does not import all others.

    Tests that take long begin first: at the end one core would work while the others have nothing left."""
    alone = [item for item in items if item.get_closest_marker("alone")]
    if astray := [item.nodeid for item in alone if Path(__file__).parent / "e2e" not in item.path.parents]:
        raise pytest.UsageError(f"a test that runs alone has its place in tests/e2e: {', '.join(astray)}")
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """What was imported until now stays: a collection of garbage need not look at its 600,000 objects once more.

    It would take 0.3 s each time: compiling causes some, and a child that is kept for another block asks for one."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the machine's state or shares a device lock with another."""
    monkeypatch.setenv("DYNOTUNE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DYNOTUNE_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setenv("DYNOTUNE_MIN_FREE_DISK_GIB", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("DYNOTUNE_DATABASE_URL", "DYNOTUNE_DATA_ROOTS", "DYNOTUNE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[postgres.Server]:
    """One server with a migrated template database."""
    server = postgres.start(tmp_path_factory.mktemp("postgres"))
    try:
        server.create_database(TEMPLATE)
        upgrade(server.url(TEMPLATE))
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database, closed, so that a copy of this one file is all of it."""
    file = tmp_path_factory.mktemp("sqlite") / "template.db"
    upgrade(f"sqlite:///{file}")
    assert [one.name for one in file.parent.iterdir()] == [file.name]
    return file


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A migrated database of each kind."""
    if request.param == "sqlite":
        shutil.copyfile(request.getfixturevalue("sqlite_template"), tmp_path / "test.db")
        yield f"sqlite:///{tmp_path / 'test.db'}"
        return
    server = request.getfixturevalue("postgres_server")
    name = f"test_{os.getpid()}_{next(_numbers)}"
    server.create_database(name, TEMPLATE)
    yield server.url(name)
    server.drop_database(name)


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """An engine on the test's database."""
    made = connect(database_url)
    yield made
    made.dispose()


@pytest.fixture
def queue(engine: Engine) -> Queue:
    """The queue on the test's database."""
    return Queue(engine, retry_seconds=0.0)


@pytest.fixture
def facts() -> Callable[..., HardwareFacts]:
    """Makes hardware facts; any field can be given."""

    def make(**changes: Any) -> HardwareFacts:
        values: dict[str, Any] = {
            "host": "here",
            "device": "cpu",
            "name": "Test CPU",
            "memory_bytes": 16 << 30,
            "cores": 2,
            "bf16_native": False,
            "versions": {"python": "3.11", "torch": "2.13.0"},
            "packages": {name: Package(version="1") for name in ("peft", "bitsandbytes")},
        }
        return HardwareFacts(**(values | changes))

    return make


@pytest.fixture
def spec() -> Callable[..., JobSpec]:
    """Makes a job; any field can be given."""

    def make(**changes: Any) -> JobSpec:
        values: dict[str, Any] = {
            "name": "test",
            "model": {"source": "org/model"},
            "dataset": {"source": "org/data"},
            "training": {"effective_batch_size": 32},
            "search": {"minutes": 60, "verify": "quick", "trials": 6},
        }
        return JobSpec.model_validate(values | changes)

    return make
