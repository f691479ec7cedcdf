"""Runs the migrations online, on the URL that service.db passes in (or DYNOTUNE_DATABASE_URL)."""

from alembic import context
from sqlalchemy import create_engine, text

from service.models import Base
from service.settings import Settings

VERSION_TABLE = "dynotune_alembic_version"


def run() -> None:
    """Upgrade in one transaction; on SQLite with foreign keys off, and checked before the commit."""
    url = context.config.attributes.get("url") or Settings.from_environment().database_url
    engine = create_engine(url)
    sqlite = engine.dialect.name == "sqlite"
    with engine.connect() as connection:
        if sqlite:
            # On, SQLite would cascade a batch migration's table swap and delete child rows.
            connection.execute(text("PRAGMA foreign_keys=OFF"))
            connection.commit()
        else:
            # Two services that start at once must not both migrate.
            connection.execute(text("SELECT pg_advisory_lock(7263541)"))
            connection.commit()
        context.configure(
            connection=connection,
            target_metadata=Base.metadata,
            version_table=VERSION_TABLE,
            render_as_batch=sqlite,
        )
        with context.begin_transaction():
            context.run_migrations()
            if sqlite and connection.execute(text("PRAGMA foreign_key_check")).first():
                raise RuntimeError("the migration broke a foreign key; nothing was changed")
        connection.commit()
        if not sqlite:
            connection.execute(text("SELECT pg_advisory_unlock(7263541)"))
            connection.commit()
    engine.dispose()


run()
