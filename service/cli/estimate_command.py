"""`dynotune estimate`: the memory that a job would need, worked out from the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import ByteSize, Field, TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from service.cli.common import connect
from service.cli.embedded import LocalWorker, control_plane
from service.cli.jobfile import read_job
from service.cli.output import say
from service.cli.tune import private
from service.client import Client
from service.contract.estimate import Estimate
from service.errors import Misconfigured
from service.settings import Settings

SIZE = TypeAdapter(Annotated[ByteSize, Field(gt=0)])


def gibibytes(text: str) -> float:
    """A size such as 24GiB or 80GB in GiB; a number alone is GiB. Misconfigured says what was wrong."""
    try:
        return SIZE.validate_python(f"{text}GiB" if text.strip()[-1:].isdigit() else text) / 2**30
    except (ValidationError, OverflowError) as error:
        raise Misconfigured(f"--memory: {text!r} is no size; write 24GiB or 80GB.") from error


def estimate(path: Path, memory: str, url: str | None, as_json: bool, console: Console) -> int:
    """Ask the control plane at `url`, or without one a private control plane with a worker; print the answer."""
    job, memory_gib = read_job(path), gibibytes(memory)
    if url:
        with connect(url) as client:
            found = client.estimate(job, memory_gib, look=told_of_no_worker(client))
    else:
        settings = Settings.from_environment()
        with private(settings, job) as own, control_plane(own) as local, Client(local) as client:
            worker = LocalWorker(own)
            try:
                found = client.estimate(job, memory_gib, look=lambda _: worker.check())
            finally:
                worker.stop()
    if as_json:
        print(found.model_dump_json(indent=2))
    else:
        show(found, console)
    return 0


def told_of_no_worker(client: Client) -> Callable[[object], None]:
    """A function for Client.estimate that says, when it is first called, that no worker is connected, if none is."""
    looked = False

    def look(_: object) -> None:
        nonlocal looked
        if not looked and not any(one.alive for one in client.workers()):
            say("No worker is connected, so the estimate waits; start one with `dynotune worker`.")
        looked = True

    return look


def show(found: Estimate, console: Console) -> None:
    """Print an estimate as a table in GiB."""
    table = Table(title=f"{found.memory_gib:.2f} GiB ({found.device}), samples of {found.max_length} tokens")
    columns = ("weights", "gradients", "optimizer", "activations", "temporary", "overhead")
    for name in ("method", *columns, "peak", "largest micro batch"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for method, one in found.methods.items():
        sizes = [*(getattr(one, f"{name}_gib") for name in columns), one.line.at(1) / 2**30]
        table.add_row(
            method, *(f"{size:.2f}" for size in sizes), f"{one.largest_micro_batch}: {one.note}".removesuffix(": ")
        )
    console.print(table)
    console.print("GiB; activations, temporary and the peak of a step are for one sample.", soft_wrap=True)
    console.print(found.statement, soft_wrap=True)
