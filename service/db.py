"""Engine, sessions and schema, for SQLite (WAL, BEGIN IMMEDIATE) and PostgreSQL (psycopg)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, OperationalError
from sqlalchemy.pool import NullPool

import migrations
from service.errors import Unavailable

MIGRATIONS = Path(migrations.__file__).parent


def connect(url: str) -> Engine:
    """An engine for the URL; Unavailable when the URL cannot be understood. Opens no connection yet."""
    try:
        if url.startswith("sqlite"):
            return _sqlite(url)
        return create_engine(url, pool_pre_ping=True, pool_size=5, max_overflow=20)
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise Unavailable(f"DYNOTUNE_DATABASE_URL is not a database URL that can be used: {error}") from error


def _sqlite(url: str) -> Engine:
    # A connection each time: SQLite connections are cheap, and none may cross a thread or a fork.
    engine = create_engine(url, poolclass=NullPool, connect_args={"timeout": 30})

    @event.listens_for(engine, "connect")
    def _pragmas(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver must not begin transactions of its own
        for pragma in ("journal_mode=WAL", "busy_timeout=30000", "foreign_keys=ON", "synchronous=NORMAL"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        # IMMEDIATE: the write lock is taken at once, so a transaction never fails half-way with SQLITE_BUSY.
        kind = "DEFERRED" if connection.get_execution_options().get("readonly") else "IMMEDIATE"
        connection.exec_driver_sql(f"BEGIN {kind}")

    return engine


def readonly(engine: Engine) -> Engine:
    """The same engine for reading: on SQLite it does not wait for the write lock."""
    return engine.execution_options(readonly=True)


def alembic_config(url: str) -> Config:
    """Alembic's configuration for the URL."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["url"] = url
    return config


def upgrade(url: str) -> None:
    """Bring the schema up to date; Unavailable when the database cannot be reached."""
    try:
        command.upgrade(alembic_config(url), "head")
    except OperationalError as error:
        raise Unavailable(f"the database cannot be reached: {error.orig}") from error
