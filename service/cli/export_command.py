"""`dynotune export`: a recommendation written for a trainer, or a list of the trainers it can be written for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli.common import LOCAL, Json, Url, connect, emit, fail, screen
from service.errors import USAGE


def export(
    job: Annotated[str, typer.Argument(help="A job's id, or a recommendation.json.")],
    format_: Annotated[
        str | None,
        typer.Option("--format", "-f", help="Name of the export, such as train.py or trl; lists all if unset."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; stdout if not given.")] = None,
    url: Url = LOCAL,
    json_: Json = False,
) -> None:
    """Write a job's recommendation for a trainer, or list the trainers, and what each of them loses."""
    if format_ is None and output:
        fail("--output goes with --format NAME, which of the exports to write", USAGE)
    if not Path(job).is_file() and ("/" in job or job.endswith(".json")):
        fail(f"{job} does not exist; give a job's id or the path of a recommendation.json", USAGE)
    if format_ is None:
        list_exports(job, url, json_)
        return
    if Path(job).is_file():
        from service.cli.exporting import written

        text = written(Path(job), format_)
    else:
        with connect(url) as client:
            text = client.export(job, format_)
    if output:
        output.write_text(text)
    if json_:
        emit({"job": job, "format": format_, "output": str(output) if output else None, "text": text})
    elif not output:
        print(text, end="")


def list_exports(job: str, url: str, as_json: bool) -> None:
    """Print which export of a job is for whom, its command, and what is lost there."""
    if Path(job).is_file():
        from service.cli.verify import read

        best = read(Path(job))
    else:
        with connect(url) as client:
            best = client.recommendation(job)
    from service.cli.exporting import as_data, listing

    if as_json:
        emit(as_data(best, job))
        return
    console = screen()
    for line in listing(best, job):
        console.print(line, soft_wrap=True)
