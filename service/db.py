"""Database engines and schema, for SQLite (WAL, BEGIN IMMEDIATE) and PostgreSQL (psycopg)."""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import URL, Engine, create_engine, event, func, inspect, make_url, select, text
from sqlalchemy.exc import ArgumentError, DatabaseError, DBAPIError, DisconnectionError, NoSuchModuleError
from sqlalchemy.orm import Session
from sqlalchemy.pool import QueuePool

import migrations
from service.errors import Misconfigured, OtherVersion, Unavailable
from service.text import first_line

MIGRATIONS = Path(migrations.__file__).parent
POOL = {"pool_size": 5, "max_overflow": 20}
# Time-outs of connections to PostgreSQL, in seconds, the last in milliseconds. With libpq's own, a network that drops
# packets goes unnoticed for two hours; with these it is noticed before a lease runs out.
# https://www.postgresql.org/docs/current/libpq-connect.html
CONNECTION_OPTIONS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
SQLITE_SECONDS = 30  # that a connection waits for another one's lock
PAUSE = 0.02  # seconds between two attempts to change the journal
IDLE_MILLISECONDS = 15_000  # between two statements of a transaction; ours compute nothing there


def connect(url: str) -> Engine:
    """An engine for the URL; Misconfigured when the URL cannot be understood. Opens no connection yet."""
    try:
        parsed = make_url(url)
        kind = parsed.get_backend_name()
        if kind == "sqlite":
            if parsed.database in (None, "", ":memory:"):
                raise ValueError("a database in memory would be another one in every process")
            return _sqlite(url)
        if kind == "postgresql":
            wanted = CONNECTION_OPTIONS.items()
            arguments: dict[str, Any] = {name: value for name, value in wanted if name not in parsed.query}
            given = parsed.password is not None or not parsed.query.keys().isdisjoint(("password", "service"))
            if not given and (password := os.environ.get("PGPASSWORD")):
                arguments["password"] = password  # a worker takes it out of its children's environment
            return _postgresql(create_engine(url, pool_pre_ping=True, connect_args=arguments, **POOL))
        problem = f"dynotune has no {kind}"
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError, ValueError) as error:
        problem = str(error)
    raise Misconfigured(
        f"DYNOTUNE_DATABASE_URL is not a database URL that can be used ({problem}); "
        "it is sqlite:////folder/file.db or postgresql+psycopg://user:password@host/database"
    )


def _postgresql(engine: Engine) -> Engine:
    """Have the server end transactions whose client has fallen silent, or their locks would stop all others.

    By a statement, as poolers such as PgBouncer refuse most parameters of a connection's start.
    """

    @event.listens_for(engine, "connect")
    def _set(connection: Any, _record: Any) -> None:
        connection.execute(f"SET idle_in_transaction_session_timeout = {IDLE_MILLISECONDS}")
        connection.commit()

    return engine


def _sqlite(url: str) -> Engine:
    # Connections stay open: SQLite writes its log back into the file, which takes longer than a whole claim, whenever
    # the last connection is closed. A forked process must not use its parent's connections, so it begins without any.
    engine = create_engine(
        url, poolclass=QueuePool, connect_args={"timeout": SQLITE_SECONDS, "check_same_thread": False}, **POOL
    )
    _forget_after_fork(engine)

    @event.listens_for(engine, "connect")
    def _pragmas(connection: Any, record: Any) -> None:
        record.info["file"] = _identity(engine)
        connection.isolation_level = None  # the driver must not begin transactions of its own
        connection.create_function("lower", 1, _lower, deterministic=True)  # SQLite's own knows ASCII's letters only
        _log_ahead(connection)
        for pragma in ("foreign_keys=ON", "synchronous=NORMAL"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "checkout")
    def _same_file(_connection: Any, record: Any, _proxy: Any) -> None:
        if record.info["file"] != _identity(engine):  # the file was replaced: what is written into it now would be lost
            raise DisconnectionError("another file is in the place of the database")

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        # IMMEDIATE takes the write lock at once, so that a transaction cannot fail half-way with SQLITE_BUSY.
        kind = "DEFERRED" if connection.get_execution_options().get("readonly") else "IMMEDIATE"
        connection.exec_driver_sql(f"BEGIN {kind}")

    return engine


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _log_ahead(connection: sqlite3.Connection) -> None:
    """Have the file use a write-ahead log, which it keeps from then on.

    Where another process writes to a file that is still without one, as the first services that start do, SQLite
    refuses at once: it does not wait where that could be a deadlock (https://sqlite.org/c3ref/busy_handler.html).
    """
    until = time.monotonic() + SQLITE_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(PAUSE)


def _identity(engine: Engine) -> tuple[int, int] | None:
    """Which file the database is, as device and number; None when it is not there."""
    try:
        found = os.stat(engine.url.database or "")  # noqa: PTH116 - the path is asked for at each use of a connection
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _forget_after_fork(engine: Engine) -> None:
    known = weakref.ref(engine)

    def forget() -> None:
        if (mine := known()) is not None:
            mine.dispose(close=False)

    os.register_at_fork(after_in_child=forget)


@functools.lru_cache(maxsize=16)
def readonly(engine: Engine) -> Engine:
    """The same engine for reading: a transaction reads one snapshot, and on SQLite does not wait for the write lock."""
    moment = {"isolation_level": "REPEATABLE READ"} if engine.dialect.name == "postgresql" else {}
    return engine.execution_options(readonly=True, **moment)


@contextlib.contextmanager
def reading(engine: Engine) -> Iterator[Session]:
    """A session for one transaction that only reads."""
    with Session(readonly(engine)) as session, session.begin():
        yield session


def now(session: Session) -> float:
    """Seconds since 1970: by PostgreSQL's clock, which machines share, or by this machine's where SQLite is used."""
    if session.get_bind().dialect.name == "postgresql":
        return float(session.scalar(select(func.extract("epoch", func.clock_timestamp()))) or 0.0)
    return time.time()


def alembic_config(url: str) -> Config:
    """Alembic's configuration for the URL."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["url"] = url
    return config


def upgrade(url: str) -> None:
    """Bring the schema up to date in one transaction; Unavailable when the database cannot be reached or changed."""
    _make_private(url)
    try:
        command.upgrade(alembic_config(url), "head")
    except DBAPIError as error:
        if damaged(error):
            raise unavailable(error) from error
        raise Unavailable(f"The database cannot be used: {_reason(error)}.") from error
    except CommandError as error:
        raise Unavailable(f"The database is not one of this version of dynotune: {error}.") from error


def has_tables(engine: Engine) -> bool:
    """Whether the database has tables of some version of dynotune. A SQLite file that is not there is not made."""
    file = _file(engine.url)
    if file and not Path(file).exists():
        return False
    with readonly(engine).connect() as connection:
        return inspect(connection).has_table("dynotune_alembic_version")


def _file(url: URL) -> str:
    """The path of SQLite's file; empty for another database."""
    return (url.database or "").removeprefix("file:") if url.get_backend_name() == "sqlite" else ""


def _make_private(url: str) -> None:
    """Make a SQLite file that is not there yet its owner's alone: it will have the jobs of all users.

    SQLite gives the files beside it, such as the write-ahead log, the same mode.
    """
    file = _file(make_url(url)) if url.startswith("sqlite") else ""
    if file and file != ":memory:":
        with contextlib.suppress(OSError):  # it is there; or it cannot be made, as the upgrade will say
            os.close(os.open(file, os.O_CREAT | os.O_EXCL, 0o600))


def check(engine: Engine) -> None:
    """Unavailable when the database does not answer, or has no schema yet. Takes no lock."""
    try:
        with readonly(engine).connect() as connection:
            connection.execute(text("SELECT 1 FROM workers LIMIT 1"))
    except DBAPIError as error:
        raise unavailable(error) from error


@functools.cache
def revision() -> str:
    """The revision of the schema that this version of dynotune works with."""
    return ScriptDirectory(str(MIGRATIONS)).get_current_head() or ""


def check_revision(session: Session) -> None:
    """OtherVersion when the database's schema is not the one of this version of dynotune."""
    found = session.scalar(text("SELECT version_num FROM dynotune_alembic_version"))
    if found != revision():
        raise OtherVersion(
            f"The database has the tables of revision {found}, this program works with revision {revision()}; bring "
            "both to one version of dynotune: `dynotune serve` of the newer one brings the tables up to date."
        )


def unavailable(error: DBAPIError) -> Unavailable:
    """The error that a user gets whose request failed with a database error."""
    if damaged(error):
        return Unavailable(
            f"The database is damaged ({_reason(error)}); put a copy of it in its place, or move the file away to "
            "begin with an empty one."
        )
    if lacks_schema(error):
        return Unavailable("The database has no tables yet, or old ones; `dynotune serve` brings them up to date.")
    return Unavailable(f"The database does not answer ({_reason(error)}); try again in a moment.")


def damaged(error: BaseException | None) -> bool:
    """Whether SQLite says that its file is damaged, or is none of its own. It does so by the bare DatabaseError."""
    return type(error) is DatabaseError


def lacks_schema(error: DBAPIError) -> bool:
    """Whether the error is that a table or a column does not exist."""
    missing = ("no such table", "no such column")  # SQLite has no error codes for these
    return getattr(error.orig, "sqlstate", None) in ("42P01", "42703") or any(one in str(error.orig) for one in missing)


def _reason(error: DBAPIError) -> str:
    """What the database says, as a part of a sentence."""
    return first_line(error.orig).rstrip(".")
