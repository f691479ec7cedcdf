"""`dynotune keys` changes nobody's tables, and makes no database by mistake."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from service.db import revision
from tests.cli.test_cli import Run, run

__all__ = ["run"]  # a fixture


def test_keys_are_made_in_a_new_database_but_not_looked_for_in_one(run: Run, tmp_path: Path) -> None:
    """In a shell without the service's settings, an empty list was shown, of a database that was made by that."""
    for arguments in (("ls",), ("revoke", "key")):
        done = run("keys", *arguments)
        assert done.returncode == 2 and "set DYNOTUNE_DATABASE_URL or DYNOTUNE_HOME as the control plane" in done.stderr
        assert not (tmp_path / "home" / "dynotune.db").exists()
    done = run("keys", "create", "bob")
    assert done.returncode == 0 and done.stdout.startswith("dyno_") and "dynotune.db is a new database" in done.stderr
    assert run("keys", "create", "eve").stderr == ""
    assert "bob" in run("keys", "ls").stdout


def test_tables_of_another_version_are_left_as_they_are(run: Run, tmp_path: Path) -> None:
    """A control plane of the older version was at work with them, and could not start again."""
    assert run("keys", "create", "bob").returncode == 0
    with sqlite3.connect(tmp_path / "home" / "dynotune.db") as database:
        database.execute("UPDATE dynotune_alembic_version SET version_num = '0001'")
    for arguments in (("ls",), ("create", "eve")):
        done = run("keys", *arguments)
        assert done.returncode == 2 and f"revision 0001, this program works with revision {revision()}" in done.stderr
    with sqlite3.connect(tmp_path / "home" / "dynotune.db") as database:
        assert database.execute("SELECT version_num FROM dynotune_alembic_version").fetchall() == [("0001",)]
