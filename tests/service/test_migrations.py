"""Migrations: the models and the migrated schema are the same, on both databases; a second upgrade changes nothing."""

from __future__ import annotations

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, inspect

from service.db import upgrade
from service.models import Base


def test_the_schema_is_the_models(engine: Engine, database_url: str) -> None:
    upgrade(database_url)  # again
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": "dynotune_alembic_version"})
        assert compare_metadata(context, Base.metadata) == []
    tables = set(inspect(engine).get_table_names())
    assert {"jobs", "job_labels", "tasks", "events", "workers", "dynotune_alembic_version"} == tables
