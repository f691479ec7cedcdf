"""The commands. Exit codes: 0 done, 1 job failed, 2 wrong usage, 3 control plane unreachable, 130 interrupted.

Each command imports what it needs when it runs: a look at the jobs must not wait for the web server's imports.
"""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from service import __version__
from service.cli import export_command, fleet, keys, webhooks
from service.cli.common import LOCAL, Json, Url, connect, emit, fail, screen
from service.cli.launch import launch
from service.cli.pace import be_short
from service.contract.states import JobStatus
from service.errors import FAILED, UNREACHABLE, USAGE, DynotuneError, Refused, Unauthorized, Unreachable
from service.worker_command import WORKER

app = typer.Typer(
    help="Measure every finetuning speed-up and get the fastest stable configuration.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(keys.app, name="keys")
app.add_typer(webhooks.app, name="webhooks")
fleet.register(app)
app.command()(export_command.export)
app.add_typer(launch, name="launch")


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Measure every finetuning speed-up and get the fastest stable configuration."""


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port.", min=1, max=65535)] = 8000,
    worker: Annotated[bool, typer.Option("--worker/--no-worker", help="Start a local worker too.")] = True,
    json_: Json = False,
) -> None:
    """Run the control plane, by default with one local worker. Brings the schema up to date first."""
    from service.cli.embedded import serve as run
    from service.settings import Settings

    def ready() -> None:
        if json_:
            name = f"[{host}]" if ":" in host else host
            emit({"url": f"http://{name}:{port}", "worker": worker})
            sys.stdout.flush()

    raise typer.Exit(0 if run(Settings.from_environment(), host, port, worker, ready) else FAILED)


# The worker describes its own options: `dynotune worker --help` is handed on to it.
@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def worker(
    context: typer.Context,
    devices: Annotated[str, typer.Option(help="first, all, or a list such as cuda:0,cuda:1")] = "first",
    json_: Json = False,
) -> None:
    """Measure trials on this machine: one process a device."""
    if json_:
        emit({"devices": devices})
        sys.stdout.flush()  # the buffer would be lost when the worker replaces this program
    os.execv(WORKER[0], [*WORKER, "--devices", devices, *context.args])


@app.command()
def tune(
    job: Annotated[Path, typer.Argument(help="The job, in YAML or JSON; - is standard input.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the results.")] = Path("dynotune-out"),
    json_: Json = False,
) -> None:
    """Run one job here and now: recommendation.json, train.py, trials.json. Ctrl-C ends it with its best so far."""
    from service.cli.tune import tune as run

    raise typer.Exit(run(job, output, json_, screen()))


@app.command()
def verify(
    recommendation: Annotated[Path, typer.Argument(help="A recommendation.json.")],
    minutes: Annotated[
        float, typer.Option(min=0.1, help="For measuring; loading and a first start come on top.")
    ] = 2.0,
    json_: Json = False,
) -> None:
    """Measure a recommendation and its baseline again, here and now: 0 if it still holds, 1 if it does not."""
    from service.cli.verify import verify as run

    raise typer.Exit(run(recommendation, minutes, json_, screen()))


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="The older recommendation.json.")],
    new: Annotated[Path, typer.Argument(help="The newer one.")],
    json_: Json = False,
) -> None:
    """Say in what two recommendations differ: 0 if the newer keeps the older one's promise, 1 if not.

    The speed-up over the baseline is judged, not tokens/s, which another load of the machine changes.
    """
    from service.cli.verify import compare as differ
    from service.cli.verify import read, show

    raise typer.Exit(show(differ(read(old), read(new)), json_, screen()))


@app.command()
def estimate(
    job: Annotated[Path, typer.Argument(help="The job, in YAML or JSON; - is standard input.")],
    memory: Annotated[str, typer.Option(help="Memory of the device, such as 24GiB.")],
    url: Annotated[
        str | None, typer.Option(envvar="DYNOTUNE_URL", help="A control plane; one of our own if unset.")
    ] = None,
    json_: Json = False,
) -> None:
    """Estimate memory and the largest batch for LoRA, QLoRA and full, without loading weights or having the device."""
    from service.cli.estimate_command import estimate as run

    raise typer.Exit(run(job, memory, url, json_, screen()))


@app.command()
def submit(
    job: Annotated[Path, typer.Argument(help="The job, in YAML or JSON; - is standard input.")],
    key: Annotated[
        str | None, typer.Option("--idempotency-key", help="With the same key again, the job is not submitted twice.")
    ] = None,
    upload: Annotated[
        bool, typer.Option("--upload", help="Send the dataset's file and the chat template along.")
    ] = False,
    url: Url = LOCAL,
    json_: Json = False,
) -> None:
    """Submit a job and print its id."""
    from service.cli.jobfile import read_job, with_template

    spec = read_job(job)
    with connect(url) as client:
        if upload:
            spec = with_template(spec)
            spec["dataset"]["source"] = client.upload(Path(spec["dataset"]["source"]))
        job_id = client.submit(spec, key)
    if json_:
        emit({"id": job_id})
    else:
        print(job_id)


@app.command("ls")
def list_jobs(
    status: Annotated[str | None, typer.Option(help=f"One of: {', '.join(JobStatus)}")] = None,
    label: Annotated[str | None, typer.Option(help="key=value")] = None,
    name: Annotated[str | None, typer.Option(help="Part of the name.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1_000_000, help="At most so many.")] = 50,
    url: Url = LOCAL,
    json_: Json = False,
) -> None:
    """List jobs, newest first."""
    with connect(url) as client:
        jobs = list(islice(client.jobs(status, label, name), limit))
    if json_:
        emit(jobs)
        return
    from service.cli import display

    screen().print(display.job_table(jobs))


@app.command()
def show(job: str, url: Url = LOCAL, json_: Json = False) -> None:
    """Show a job: its status, and its recommendation so far."""
    with connect(url) as client:
        found = client.job(job)
        best = client.recommendation(job) if found.best else None
    if json_:
        emit(found)
        return
    from service.cli import display
    from service.cli.output import one_line

    console = screen()
    console.print(f"{one_line(found.name)} ({found.id}): {display.status_line(found)}", soft_wrap=True)
    for line in (found.error, *(() if best else found.notes)):
        if line:
            console.print(one_line(line), soft_wrap=True)
    if best:
        from service.cli.exporting import show_next  # imported here, as it imports all exports
        from service.cli.result import show_result

        show_result(console, best)
        show_next(console, best, job)


@app.command()
def watch(job: str, url: Url = LOCAL, json_: Json = False) -> None:
    """Follow a job until it has ended."""
    from service.cli import display

    with connect(url) as client:
        if json_:
            ended = client.wait(job)
            emit(ended)
        else:
            known = display.Trials(lambda: client.trials(job))
            with display.Progress(screen()) as progress:
                ended = client.wait(job, look=lambda seen: progress.show(seen, known.of(seen)))
            if ended.error:
                screen().print(ended.error, soft_wrap=True)
            if ended.best:
                from service.cli.exporting import show_next
                from service.cli.result import show_result

                best = client.recommendation(job)
                show_result(screen(), best)
                show_next(screen(), best, job)
    raise typer.Exit(0 if ended.status is JobStatus.succeeded else FAILED)


@app.command()
def trials(
    job: str,
    log: Annotated[int | None, typer.Option(help="Print the output of the trial with this number.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="With --log: go on until the trial has ended.")] = False,
    url: Url = LOCAL,
    json_: Json = False,
) -> None:
    """List a job's trials, or print one trial's output."""
    if follow and log is None:
        fail("--follow goes with --log N, the number of the trial to follow", USAGE)
    with connect(url) as client:
        found = client.trials(job)
        if log is not None:
            numbers = {trial.number: trial.id for trial in found}
            if log not in numbers:
                fail(f"job {job} has no trial {log}", USAGE)
            from service.cli import trial_log

            emit(client.trial(numbers[log])) if json_ else trial_log.show(client, numbers[log], follow)
            return
    if json_:
        emit(found)
        return
    from service.cli import display

    screen().print(display.trial_table(found))


@app.command()
def stop(job: str, url: Url = LOCAL, json_: Json = False) -> None:
    """End a job now; its best so far is its answer."""
    with connect(url) as client:
        client.stop(job)
        ended = client.job(job)
    emit(ended) if json_ else print(f"{job}: {ended.status}")


@app.command()
def cancel(job: str, url: Url = LOCAL, json_: Json = False) -> None:
    """End a job now as cancelled; nothing more is computed for it."""
    with connect(url) as client:
        client.cancel(job)
        ended = client.job(job)
    emit(ended) if json_ else print(f"{job}: {ended.status}")


@app.command()
def delete(job: str, url: Url = LOCAL, json_: Json = False) -> None:
    """Delete a job that has ended, with all that it measured."""
    with connect(url) as client:
        client.delete(job)
    emit({"id": job}) if json_ else print(f"{job}: deleted")


@app.command()
def clone(
    job: str,
    changes: Annotated[
        str, typer.Option("--changes", help='What differs, as JSON, such as \'{"search": {"minutes": 60}}\'.')
    ] = "{}",
    url: Url = LOCAL,
    json_: Json = False,
) -> None:
    """Submit a job again, or one that differs from it, and print the new id."""
    from service.jobtext import read

    with connect(url) as client:
        job_id = client.clone(job, read(changes.encode(), "--changes", "what changes in the job"))
    emit({"id": job_id}) if json_ else print(job_id)


@app.command()
def events(
    job: str,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for further events until the job ends.")] = False,
    url: Url = LOCAL,
    json_: Json = False,
) -> None:
    """Print what happened to a job; with --json as a list, or with --follow as one line for each event."""
    from service.cli.display import event_line

    with connect(url) as client:
        if json_ and not follow:
            emit([*client.events(job)])
            return
        for event in client.follow(job) if follow else client.events(job):
            if json_:
                print(event.model_dump_json(), flush=True)
            else:
                screen().print(event_line(event), soft_wrap=True)


@app.command()
def levers(url: Url = LOCAL, json_: Json = False) -> None:
    """List every lever and choice, and what each worker offers."""
    try:
        with connect(url) as client:
            found = client.levers()
    except Unreachable:
        from service.catalogue import catalogue

        found = catalogue()  # only what the workers offer needs a control plane
        if not json_:
            screen().print(f"No control plane at {url}: shown without workers.", style="dim")
    if json_:
        emit(found)
        return
    from rich.text import Text

    console = screen()
    for lever in found.levers:
        console.print(Text.assemble((lever.name, "bold"), "  ", lever.summary))
        for choice in lever.choices:
            mark = " (baseline)" if choice.name == lever.baseline else ""
            console.print(f"  {choice.name}{mark}: {choice.summary}")
            for name, state in choice.workers.items():
                if not state.available:
                    console.print(f"    {name}: {state.why_not}", style="yellow")


@app.command()
def doctor(json_: Json = False) -> None:
    """Say what this machine can run: devices, memory, versions, optional packages."""
    from service.cli.doctor import report

    raise typer.Exit(report(screen(), json_))


@app.command()
def version(json_: Json = False) -> None:
    """Print the version."""
    emit({"version": __version__}) if json_ else print(__version__)


def main() -> None:
    """Run the command line. A mistake of the user is answered with one sentence, never with a traceback."""
    be_short()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a job's name may have what the terminal's encoding has not
    try:
        app()
    except Unreachable as error:
        fail(f"{error}; start one with `dynotune serve`, or name it with --url", UNREACHABLE)
    except Refused as error:
        hint = " The command line takes it from DYNOTUNE_KEY." if error.code == Unauthorized.code else ""
        fail(f"{error}{hint}", UNREACHABLE if error.problem.status == 503 else USAGE)
    except DynotuneError as error:
        fail(error.detail, UNREACHABLE if error.status == 503 else USAGE)
    except (BrokenPipeError, KeyboardInterrupt):
        raise SystemExit(130) from None
    except UnicodeError as error:
        fail(f"what was given is no text in UTF-8 ({error})", USAGE)
    except OSError as error:
        fail(f"{error.filename or 'the system'}: {error.strerror}", USAGE)
