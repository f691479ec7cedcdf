"""Alembic migrations, from the first commit on. `dynotune serve` brings the schema up to date."""
