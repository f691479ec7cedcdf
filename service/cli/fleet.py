"""Commands about workers: who measures, and ending one in order."""

from __future__ import annotations

import typer

from service.cli.common import LOCAL, Json, Url, connect, emit, screen


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(workers)
    app.command()(drain)


def workers(url: Url = LOCAL, json_: Json = False) -> None:
    """List the workers, their devices, and what they do."""
    with connect(url) as client:
        found = client.workers()
    if json_:
        emit(found)
        return
    from rich.table import Table

    from service.cli.display import ago
    from service.cli.output import one_line

    table = Table("id", "device", "memory GiB", "state", "seen", box=None, pad_edge=False)
    for worker in found:
        state = "gone" if not worker.alive else "ending" if worker.draining else worker.state
        memory = f"{worker.facts.memory_bytes / 2**30:.0f}"
        table.add_row(worker.id, one_line(worker.facts.name), memory, state, ago(worker.seen_at))
    screen().print(table)


def drain(worker: str, url: Url = LOCAL, json_: Json = False) -> None:
    """Have a worker finish what it does, take nothing further, and end."""
    with connect(url) as client:
        client.drain(worker)
    emit({"id": worker}) if json_ else print(f"{worker}: ends once its present task has ended")
