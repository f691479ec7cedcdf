"""Runs the migrations online, on the URL that service.db passes in (or DYNOTUNE_DATABASE_URL)."""

from alembic import context
from sqlalchemy import Engine, text

from service.db import connect
from service.models import Base
from service.settings import Settings

VERSION_TABLE = "dynotune_alembic_version"


def run() -> None:
    """Upgrade in one transaction, one starter at a time; on SQLite with foreign keys off, checked before the commit."""
    url = context.config.attributes.get("url") or Settings.from_environment().database_url
    engine = connect(url)
    try:
        _run(engine)
    finally:
        engine.dispose()


def _run(engine: Engine) -> None:
    sqlite = engine.dialect.name == "sqlite"
    with engine.connect() as connection:
        if sqlite:
            # On, SQLite would cascade a batch migration's table swap and delete child rows. Past SQLAlchemy, which
            # would begin a transaction first, in which the pragma does nothing.
            connection.connection.cursor().execute("PRAGMA foreign_keys=OFF")
        # Two services that start at once must not both migrate: BEGIN IMMEDIATE on SQLite, a lock on PostgreSQL.
        with connection.begin():
            if not sqlite:
                connection.execute(text("SELECT pg_advisory_xact_lock(7263541)"))
            context.configure(
                connection=connection,
                target_metadata=Base.metadata,
                version_table=VERSION_TABLE,
                render_as_batch=sqlite,
            )
            context.run_migrations()
            if sqlite and connection.execute(text("PRAGMA foreign_key_check")).first():
                raise RuntimeError("the migration broke a foreign key; nothing was changed")


run()
