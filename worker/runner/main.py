"""`python -m worker`: options and signals of a worker process, which serves one device or starts a process for each.

Modules that take long to import are imported where they are used, so that a mistake in an option is told at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.contract.task import LEASE_SECONDS, MOST_LEASE_SECONDS
from service.errors import FAILED, UNREACHABLE, USAGE, BrokerUnavailable, DynotuneError, Misconfigured
from service.worker_command import WORKER
from worker.runner.several import Processes
from worker.runner.stay import Stay, Terms, moment

if TYPE_CHECKING:
    from service.contract.hardware import HardwareFacts
    from service.settings import Settings
    from worker.runner.loop import Loop
    from worker.runner.measuring import Bench

SECRETS = (
    "DYNOTUNE_DATABASE_URL",
    "PGPASSWORD",
    "DYNOTUNE_KEY",
    "DYNOTUNE_ADMIN_KEY",
    "DYNOTUNE_WEBHOOK_KEY",
    "OTEL_EXPORTER_OTLP_HEADERS",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
)
DEFAULT_ENTRY = "worker.child.entry:main"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def work(
    devices: Annotated[str, typer.Option(help="first, all, or a list such as cuda:0,cuda:1 or cpu")] = "first",
    facts: Annotated[
        Path | None, typer.Option(help="Read the device's facts from this JSON file, not from the device.")
    ] = None,
    lease: Annotated[
        float, typer.Option(min=1, max=MOST_LEASE_SECONDS, help="Seconds of silence that lose a task.")
    ] = LEASE_SECONDS,
    exit_when_idle: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="[MINUTES]",
            help="End after so many minutes without a task, or after 5 if no number follows. A worker stays otherwise.",
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="End at this time (ISO 8601), or after a duration such as 3h50m. No task is begun that is not "
            "expected to end before; one that has not ended then is handed back.",
        ),
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="How long a task may go on after SIGTERM before it is handed back; the exit code is then 143. "
            "Without this option the task is finished, and the exit code is 0.",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            envvar="DYNOTUNE_SERVER", help="Work for the control plane at this URL, not through its database."
        ),
    ] = None,
    entry: Annotated[str, typer.Option(hidden=True)] = DEFAULT_ENTRY,
    lifeline: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure trials on this machine's device."""
    for number in (signal.SIGTERM, signal.SIGINT):  # until `serve` has a loop that can be told to stop
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        if server is not None and not server.startswith(("http://", "https://")):
            raise Misconfigured(f"--server: {server!r} is no control plane's URL; write http://HOST:PORT.")
        ends = moment(until, time.time()) if until is not None else None
        start(devices, facts, entry, lease, lifeline, server, Terms(exit_when_idle, ends, grace))
    except DynotuneError as error:
        sys.stderr.write(f"dynotune worker: {error.detail}\n")
        sys.exit(USAGE if isinstance(error, Misconfigured) else UNREACHABLE if error.status == 503 else FAILED)


def read_facts(file: Path) -> HardwareFacts:
    """The facts of a device from a file."""
    from service.contract.hardware import HardwareFacts
    from service.text import first_line

    try:
        return HardwareFacts.model_validate_json(file.read_text())
    except (OSError, ValueError) as error:
        raise Misconfigured(f"--facts: {file} holds no device's facts ({first_line(error)}).") from error


def environment() -> dict[str, str]:
    """The environment, with settings that act only if they are set before a process starts.

    Among them: OpenMP's threads wait without using a core, and torch checks for CUDA without making a context.
    """
    return {
        **os.environ,
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        # Arrow's own allocator reserves a GiB of what a cap counts, in the first trial only, which reads the parquet.
        "ARROW_DEFAULT_MEMORY_POOL": "system",
    }


def chosen(found: list[HardwareFacts], devices: str) -> list[HardwareFacts]:
    """The devices that the option `devices` asks for; Misconfigured when the machine lacks one of them."""
    if devices == "first":
        return found[:1]
    if devices == "all":
        gpus = [facts for facts in found if facts.has_own_memory]
        return gpus or found[:1]
    names = {f"{facts.device}:{facts.index}": facts for facts in found} | {facts.device: facts for facts in found[::-1]}
    unknown = [name for name in devices.split(",") if name not in names]
    if unknown:
        raise Misconfigured(f"--devices: there is no device {', '.join(unknown)}; there are: {', '.join(names)}.")
    return [names[name] for name in devices.split(",")]


def start(
    devices: str, file: Path | None, entry: str, lease: float, lifeline: int | None, server: str | None, terms: Terms
) -> None:
    """Serve a single device in this process, or start a process for each of several devices."""
    from service.devices import device_facts

    os.environ.update(environment())
    served = chosen([read_facts(file)] if file else device_facts(), devices)
    if len(served) == 1:
        serve(served[0], entry, lease, lifeline, server, terms)
        return
    command = [*WORKER, "--entry", entry, "--lease", str(lease), *terms.options()]
    # The children watch a pipe whose other end only this process has: however this process ends, they end too.
    theirs, _ours = os.pipe()  # kept open here, as a process may have to be started again
    command += ["--lifeline", str(theirs), *(["--server", server] if server else [])]
    with tempfile.TemporaryDirectory(prefix="dynotune-facts-") as folder:
        # Told its facts, a process need not read all devices again, which would open a context on each of them.
        commands: dict[str, Sequence[str]] = {}
        for facts in served:
            name, known = f"{facts.device}:{facts.index}", Path(folder) / f"{facts.device}-{facts.index}.json"
            known.write_text(facts.model_dump_json())
            commands[name] = [*command, "--devices", name, "--facts", str(known)]
        sys.exit(Processes(commands, theirs).run())


def serve(
    facts: HardwareFacts, entry: str, lease: float, lifeline: int | None, server: str | None, terms: Terms
) -> None:
    """Work on one device until told to stop or drained, or until the terms of its stay end it.

    At the first SIGTERM the worker ends after its current task, which it hands back unfinished when a grace period has
    passed. At the second, at SIGINT, or when the lifeline ends, it hands the task back at once and ends. With a grace
    period the exit code is that of a process ended by SIGTERM, which tells a scheduler that this one is to be replaced.
    """
    from service import logs, tracing
    from service.broker import connect
    from service.ownkey import api_key
    from service.patience import Patience
    from service.settings import Settings
    from worker.runner.lock import DeviceLock
    from worker.runner.loop import Loop

    settings = Settings.from_environment()
    logs.show(settings.log, settings.log_level)
    tracing.start("worker")
    broker = connect(server or settings.database_url, lease, api_key())
    for name in SECRETS:  # a model may bring code of its own, which runs in the children of this process
        os.environ.pop(name, None)
    bench = _bench(facts, entry, settings)
    worker_id = f"{facts.device}{facts.index}-{secrets.token_hex(4)}"
    try:
        lock = DeviceLock(settings.lock_folder, facts.lock_name)
    except OSError as error:
        raise Misconfigured(f"DYNOTUNE_LOCKS: {settings.lock_folder} cannot be made ({error.strerror}).") from error
    loop = Loop(broker, worker_id, bench, lock, settings.min_free_disk_bytes, Stay(terms), Patience(lease))
    # In a thread, because a signal handler that interrupts code which holds the event's lock would wait forever.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=loop.stop).start())
    signal.signal(signal.SIGINT, lambda *_: threading.Thread(target=loop.stop, args=(True,)).start())
    if lifeline is not None:
        threading.Thread(target=_watch, args=(lifeline, loop), daemon=True, name="lifeline").start()
    if settings.log == "json":  # for programs, which read nothing else
        logs.logger("dynotune.worker").info("measures", worker=worker_id, device=facts.name)
    else:
        sys.stderr.write(f"worker {worker_id}: measuring on {facts.name}\n")
    try:
        loop.run()
    finally:
        with contextlib.suppress(BrokerUnavailable, DynotuneError):  # the queue forgets silent workers by itself
            broker.leave(worker_id)
        bench.sandbox.close()
    if loop.told_to_end and terms.grace_seconds is not None:
        sys.exit(128 + signal.SIGTERM)


def _bench(facts: HardwareFacts, entry: str, settings: Settings) -> Bench:
    """What this worker measures on, and what a trial's process may use there."""
    from service.contract.child import Workplace
    from worker.runner.measuring import Bench
    from worker.runner.sandbox import Sandbox

    workplace = Workplace(
        device=facts.device,
        index=facts.index,
        data_roots=settings.data_roots,
        hub_cache=settings.hub_cache,
        uploads=settings.uploads,
        quantised_weights=settings.home / "quantised",
        allow_pickle=settings.allow_pickle,
        allow_remote_code=settings.allow_remote_code,
    )
    sandbox = Sandbox(facts.has_own_memory, entry, log=settings.home / "worker.log", capability=facts.capability)
    return Bench(sandbox=sandbox, facts=facts, home=settings.home, workplace=workplace)


def _watch(lifeline: int, loop: Loop) -> None:
    """Stop the loop when the lifeline's other end closes: the process that started this one has ended."""
    os.read(lifeline, 1)
    loop.stop(now=True)
