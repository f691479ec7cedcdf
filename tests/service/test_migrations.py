"""Migrations: the models and the migrated schema are the same, on both databases; all or nothing, one at a time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, inspect, text

from service.db import check, connect, upgrade
from service.errors import Unavailable
from service.models import Base
from tests.conftest import ROOT

TABLES = {"estimates", "jobs", "job_labels", "tasks", "events", "workers", "dynotune_alembic_version"}


def test_the_schema_is_the_models(engine: Engine, database_url: str) -> None:
    upgrade(database_url)  # again
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": "dynotune_alembic_version"})
        assert compare_metadata(context, Base.metadata) == []
    assert set(inspect(engine).get_table_names()) == TABLES


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """A database without a schema."""
    url = f"sqlite:///{tmp_path / 'empty.db'}"
    server = request.getfixturevalue("postgres_server") if request.param == "postgresql" else None
    if server:
        server.create_database("empty")
        url = server.url("empty")
    engine = connect(url)
    yield engine
    engine.dispose()
    if server:
        server.drop_database("empty")


def url_of(engine: Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


def test_a_migration_that_fails_half_way_changes_nothing(empty: Engine) -> None:
    with empty.begin() as connection:
        connection.execute(text("CREATE TABLE workers (id INTEGER)"))  # in the way of the last table
    with pytest.raises(Unavailable, match="workers"):
        upgrade(url_of(empty))
    assert set(inspect(empty).get_table_names()) == {"workers"}


def test_services_that_start_at_once(empty: Engine) -> None:
    command = [sys.executable, "-c", "import sys; from service.db import upgrade; upgrade(sys.argv[1])", url_of(empty)]
    starters = [subprocess.Popen(command, cwd=ROOT) for _ in range(4)]
    assert [starter.wait(60) for starter in starters] == [0] * 4
    assert set(inspect(empty).get_table_names()) == TABLES


def test_a_database_without_a_schema_is_told(empty: Engine) -> None:
    with pytest.raises(Unavailable, match="no tables yet"):
        check(empty)
    upgrade(url_of(empty))
    check(empty)
    with empty.begin() as connection:
        connection.execute(text("UPDATE dynotune_alembic_version SET version_num = 'future'"))
    with pytest.raises(Unavailable, match="not one of this version"):
        upgrade(url_of(empty))
