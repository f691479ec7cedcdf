"""What all launchers have in common: options, the worker's command, what may be in a file, and handing it in."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from service.contract.duration import seconds_of
from service.errors import Misconfigured

DATABASE, SERVER, KEY = "DYNOTUNE_DATABASE_URL", "DYNOTUNE_SERVER", "DYNOTUNE_KEY"
HAND_BACK_SECONDS = 15  # of the grace period, to end a trial's process and hand the trial back
LEAST_WORKER_SECONDS = 300  # that `--time` may say, as a worker measures little in less
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET = re.compile(r"DATABASE_URL$|PASSWORD|PASSWD|SECRET|CREDENTIAL|(TOKEN|KEY)S?($|_)", re.IGNORECASE)
URL_WITH_PASSWORD = re.compile(r"://[^/\s]*:[^/\s]*@")
ASSIGNED = re.compile(r"(\w+)=")
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

Given = TypeVar("Given", bound=str | None)
Workers = Annotated[int, typer.Option("--workers", "-n", min=1, max=10_000, help="How many workers.")]
Gpus = Annotated[int, typer.Option(min=0, max=64, help="GPUs of each worker, each measured on alone; 0: the CPU.")]
Cpus = Annotated[int | None, typer.Option(min=1, help="CPU cores of each worker.")]
Memory = Annotated[str | None, typer.Option(help="Host memory of each worker, as the cluster writes it.")]
Idle = Annotated[float, typer.Option(min=0, help="Minutes without a task after which a worker ends.")]
Time = Annotated[str | None, typer.Option(help="How long a worker lives at most, such as 3h50m.")]
Server = Annotated[
    str | None,
    typer.Option(help=f"The control plane's URL: workers speak to it, with the API key {KEY}, not to its database."),
]
Env = Annotated[
    list[str] | None,
    typer.Option(help="NAME=VALUE in the workers' environment; may be repeated. It is in the file: no secrets."),
]
Name = Annotated[str, typer.Option(help="Name of the cluster's job.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="File to write; stdout if not given.")]
Submit = Annotated[bool, typer.Option("--submit", help="Hand it in to the cluster, too.")]


def worker_command(gpus: int, idle: float, grace: int, seconds: int | None) -> list[str]:
    """The command of a worker that has `grace` seconds between SIGTERM and its end, and lives for `seconds` at most."""
    options = ["--devices", "all" if gpus else "cpu", "--exit-when-idle", f"{idle:g}"]
    options += ["--grace", str(max(0, grace - HAND_BACK_SECONDS))]
    return ["dynotune", "worker", *options, *([] if seconds is None else ["--until", f"{seconds}s"])]


def seconds_in(time: str | None, least: int) -> int | None:
    """The seconds of `--time`; Misconfigured where that is no duration, or less than `least`."""
    if time is None:
        return None
    try:
        seconds = seconds_of(time)
    except ValueError as error:
        raise Misconfigured(f"--time: {error}.") from error
    if seconds < least:
        raise Misconfigured(f"--time: {time} is too short for a worker to measure anything; {least} s are the least.")
    return seconds


def word(option: str, value: Given, allowed: str, most: int, what: str) -> Given:
    """The value if it was not given or the regular expression `allowed` accepts it; Misconfigured otherwise."""
    if value is not None and (len(value) > most or not re.fullmatch(allowed, value)):
        raise Misconfigured(f"{option}: {value[:80]!r} is not {what}.")
    return value


def line(option: str, value: str) -> str:
    """The value if it is one line of text and sets no secret, which must not be in a file; Misconfigured otherwise."""
    if not value.strip() or UNPRINTABLE.search(value):
        raise Misconfigured(f"{option}: {value[:80]!r} is not one line of text.")
    if URL_WITH_PASSWORD.search(value):
        raise Misconfigured(f"{option}: a URL with a password must not be in the file.")
    for name in ASSIGNED.findall(value):
        public(option, name)
    return value


def server_url(url: str | None) -> str | None:
    """The URL of `--server` if it was given; Misconfigured where it is none."""
    return (
        None
        if url is None
        else word("--server", line("--server", url), r"https?://\S+", 2000, "a URL of http or https")
    )


def public(option: str, name: str) -> None:
    """Misconfigured when a variable of this name holds a secret, which must not be in a file."""
    if SECRET.search(name):
        raise Misconfigured(f"{option}: {name} is a secret by its name, and must not be in the file.")


def variables(pairs: Iterable[str]) -> dict[str, str]:
    """The NAME=VALUE pairs of `--env`; Misconfigured for what is no pair, and for what looks like a secret."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not VARIABLE.fullmatch(name):
            raise Misconfigured(f"--env: {name[:80]!r} is no variable's name followed by = and a value.")
        public("--env", name)
        found[name] = line(f"--env {name}", value) if value else ""
    return found


def deliver(text: str, output: Path | None, submit: list[str] | None) -> None:
    """Write the text to a file, or hand it in as stdin of the command `submit`, or both; else print it.

    Misconfigured when that program is not there, or refuses.
    """
    if output is not None:
        output.write_text(text, encoding="utf-8")
    if submit is not None:
        print(_handed_in(text, submit).strip())
    elif output is None:
        print(text, end="")


def _handed_in(text: str, command: list[str]) -> str:
    program = command[0]
    if shutil.which(program) is None:
        raise Misconfigured(
            f"--submit: there is no {program} on this machine; write the file with --output, and hand it in by "
            f"`{' '.join(command)} < FILE` where {program} is."
        )
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise Misconfigured(f"--submit: {program} refused it: {said[:1000]}")
    return done.stdout
