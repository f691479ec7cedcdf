"""`dynotune webhooks`: URLs that are told when jobs end."""

from __future__ import annotations

from typing import Annotated

import typer

from service.cli.common import LOCAL, Json, Url, connect, emit, screen

app = typer.Typer(help="Have URLs told when jobs end (Standard Webhooks).", no_args_is_help=True)
Hook = Annotated[str, typer.Argument(help="The webhook's id.")]


@app.command()
def add(
    target: Annotated[str, typer.Argument(help="Where messages are sent to: https://...")],
    url: Url = LOCAL,
    json_: Json = False,
) -> None:
    """Make a webhook, and print the secret by which its receiver checks signatures. It is shown this once."""
    with connect(url) as client:
        made = client.add_webhook(target)
    emit(made) if json_ else print(f"{made.id}: {made.secret}")


@app.command("ls")
def list_webhooks(url: Url = LOCAL, json_: Json = False) -> None:
    """List your webhooks, and what became of their last message."""
    with connect(url) as client:
        found = client.webhooks()
    if json_:
        emit(found)
        return
    from rich.table import Table

    from service.cli.display import moment
    from service.cli.output import one_line

    table = Table("id", "url", "state", "waiting", "last tried", "last error", box=None, pad_edge=False)
    for one in found:
        state = "ended" if one.disabled_at else "in use"
        error = one_line(one.last_error or "")
        table.add_row(one.id, one_line(one.url), state, str(one.waiting), moment(one.last_tried_at), error)
    screen().print(table)


@app.command()
def test(webhook: Hook, url: Url = LOCAL, json_: Json = False) -> None:
    """Have a test message sent."""
    with connect(url) as client:
        client.test_webhook(webhook)
    emit({"id": webhook}) if json_ else print(f"{webhook}: a test message is sent")


@app.command()
def rm(webhook: Hook, url: Url = LOCAL, json_: Json = False) -> None:
    """Delete a webhook."""
    with connect(url) as client:
        client.delete_webhook(webhook)
    emit({"id": webhook}) if json_ else print(f"{webhook}: deleted")
