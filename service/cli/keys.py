"""`dynotune keys`: API keys, made on the machine of the control plane, in its database."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.common import Json, emit, screen

if TYPE_CHECKING:
    from sqlalchemy import Engine

app = typer.Typer(help="Make, list and revoke API keys, in the database of the control plane.", no_args_is_help=True)


@contextlib.contextmanager
def _database(may_be_new: bool = False) -> Iterator[Engine]:
    """The control plane's database. Misconfigured where it has no tables, unless it `may_be_new`.

    Tables of another version are left as they are: a control plane of that version may be working with them.
    """
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.orm import Session

    from service.db import check_revision, connect, has_tables, unavailable, upgrade
    from service.errors import Misconfigured
    from service.settings import Settings

    url = Settings.from_environment().database_url
    engine = connect(url)
    place = engine.url.render_as_string(hide_password=True)
    try:
        if not has_tables(engine):
            if not may_be_new:
                raise Misconfigured(
                    f"The database {place} has no tables, so no keys; set DYNOTUNE_DATABASE_URL or DYNOTUNE_HOME as "
                    "the control plane has them."
                )
            upgrade(url)
            print(f"dynotune: {place} is a new database; `dynotune serve` has to use it, too", file=sys.stderr)
        with Session(engine) as session:
            check_revision(session)
        yield engine
    except DBAPIError as error:
        raise unavailable(error) from error
    finally:
        engine.dispose()


@app.command()
def create(
    owner: Annotated[str, typer.Argument(help="Whose key it is: keys of one owner see the same jobs.")],
    scope: Annotated[
        list[str] | None, typer.Option(help="read, submit (the default), worker or admin; may be given several times.")
    ] = None,
    most_open_jobs: Annotated[
        int | None, typer.Option(min=1, max=2**31 - 1, help="More jobs that wait or run are refused.")
    ] = None,
    json_: Json = False,
) -> None:
    """Make a key and print it. It is shown this once: only its digest is kept."""
    from service import access
    from service.errors import BadQuery

    asked = scope or ["submit"]
    if unknown := [one for one in asked if one not in set(access.Scope)]:
        raise BadQuery(f"There is no scope {unknown[0]!r}; there are: {', '.join(access.Scope)}.")
    with _database(may_be_new=True) as engine:
        key = access.create(engine, owner, map(access.Scope, asked), most_open_jobs)
    emit({"key": key, "owner": owner, "scopes": asked}) if json_ else print(key)


@app.command("ls")
def list_keys(json_: Json = False) -> None:
    """List all keys, without their secrets."""
    from sqlalchemy.orm import Session

    from service import access

    with _database() as engine, Session(engine) as session:
        names = ("id", "owner", "scopes", "most_open_jobs", "created_at", "used_at", "revoked_at")
        rows = [{name: getattr(row, name) for name in names} for row in access.listed(session)]
    if json_:
        emit(rows)
        return
    from rich.table import Table

    from service.cli.display import moment

    table = Table("id", "owner", "scopes", "created", "last used", "revoked", box=None, pad_edge=False)
    for row in rows:
        times = (moment(row[name]) for name in ("created_at", "used_at", "revoked_at"))
        table.add_row(row["id"], row["owner"], " ".join(row["scopes"]), *times)
    screen().print(table)


@app.command()
def revoke(key: Annotated[str, typer.Argument(help="The key's id.")], json_: Json = False) -> None:
    """Make a key invalid from now on."""
    from service import access

    with _database() as engine:
        access.revoke(engine, key)
    emit({"id": key}) if json_ else print(f"{key}: revoked")
