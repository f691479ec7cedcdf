"""Workers as an array job on Slurm.

Sources: https://slurm.schedmd.com/sbatch.html (options, environment), https://slurm.schedmd.com/preempt.html.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from service.cli.launchers import base
from service.errors import Misconfigured

NAME = r"[A-Za-z0-9_][A-Za-z0-9_.,:@+-]*"  # of a partition, an account and so on; several are separated by commas
RESOLUTION_SECONDS = 60  # by which Slurm may send a signal too early


def launch(
    workers: base.Workers,
    gpus: base.Gpus = 1,
    cpus: base.Cpus = None,
    memory: base.Memory = None,
    partition: Annotated[str | None, typer.Option(help="Partition, or several, separated by commas.")] = None,
    account: Annotated[str | None, typer.Option(help="Account that is charged.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    time: base.Time = None,
    idle: base.Idle = 10,
    grace: Annotated[
        int, typer.Option(min=0, max=3600, help="Seconds between SIGTERM and the end: the cluster's KillWait.")
    ] = 30,
    server: base.Server = None,
    environment_file: Annotated[
        Path | None,
        typer.Option(
            help=f"File on the nodes that sets {base.DATABASE}, or {base.KEY}, in shell; nobody else should read it."
        ),
    ] = None,
    env: base.Env = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(help="Line of shell to run first, such as `source /shared/venv/bin/activate`; may be repeated."),
    ] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="Further option of sbatch, such as --constraint=a100; may be repeated.")
    ] = None,
    name: base.Name = "dynotune-worker",
    output: base.Output = None,
    submit: base.Submit = False,
) -> None:
    """Write an array job for Slurm, a worker a task. The database's URL comes from the environment or a file."""
    options = {
        "job-name": base.word("--name", name, NAME, 64, "a name of letters, digits, ., _ and -"),
        "array": f"0-{workers - 1}",
        "nodes": "1",
        "ntasks": "1",
        "gres": f"gpu:{gpus}" if gpus else None,
        "cpus-per-task": cpus,
        "mem": base.word("--memory", memory, r"\d+[KMGT]?", 20, "a size such as 64G"),
        "partition": base.word("--partition", partition, NAME, 200, "a partition's name"),
        "account": base.word("--account", account, NAME, 200, "an account's name"),
        "qos": base.word("--qos", qos, NAME, 200, "a quality of service's name"),
    }
    seconds = base.seconds_in(time, base.LEAST_WORKER_SECONDS + grace)
    if seconds is not None:
        days, rest = divmod(seconds, 86400)
        options["time"] = f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    lines = [base.line("--sbatch", one) for one in sbatch or ()]
    further = [base.word("--sbatch", one, r"--[a-z].*", 500, "an option such as --constraint=a100") for one in lines]
    commands = _queue(environment_file, base.server_url(server))
    commands += [f"export {key}={shlex.quote(value)}" for key, value in base.variables(env or ()).items()]
    commands += [base.line("--setup", one) for one in setup or ()]
    # The worker is to end by itself before Slurm sends SIGTERM at the time limit, which would count as a failure.
    lives = None if seconds is None else seconds - grace - RESOLUTION_SECONDS
    commands.append("exec " + shlex.join(base.worker_command(gpus, idle, grace, lives)))
    given = [f"--{key}={value}" for key, value in options.items() if value is not None]
    text = _script(given, further, grace, commands)
    if submit and server is None and environment_file is None and not os.environ.get(base.DATABASE):
        raise Misconfigured(
            f"--submit: {base.DATABASE} is not set here, so the workers would not have it either; export it, or name "
            "a file that says it with --environment-file."
        )
    base.deliver(text, output, ["sbatch"] if submit else None)


def _queue(file: Path | None, server: str | None) -> list[str]:
    """Shell that sets how to reach the queue: by a file on the node if one is named, else by sbatch's environment."""
    check = (
        f'if [ -z "${{{base.DATABASE}:-}}" ]; then\n'
        f'  echo "{base.DATABASE} is not set: export it before sbatch, or name a file by --environment-file" >&2\n'
        "  exit 2\n"
        "fi"
    )
    read: list[str] = []
    if file is not None:
        path = base.line("--environment-file", str(file.expanduser().absolute()))
        read = ["set -a", f". {shlex.quote(path)}", "set +a"]
    if server is not None:
        return [*read, f"export {base.SERVER}={shlex.quote(server)}"]
    return [*read, check, f"export {base.DATABASE}"]


def _script(options: list[str], further: list[str], grace: int, commands: list[str]) -> str:
    """The script: sbatch reads its options from the comments before the first command."""
    lines = [
        "#!/bin/bash",
        "# Workers of dynotune, made by `dynotune launch slurm`. Hand it in: sbatch FILE",
        *(f"#SBATCH {one}" for one in options),
        "# SIGTERM before the time limit goes to this script's own process (B), which the worker replaces (exec).",
        f"#SBATCH --signal=B:TERM@{max(1, grace)}",
        "# A worker whose node fails, or which is preempted for another job, is queued again.",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        *(f"#SBATCH {one}" for one in further),
        "",
        "set -e",
        *commands,
    ]
    return "\n".join(lines) + "\n"


LAUNCH = launch
