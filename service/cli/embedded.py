"""The control plane in this process and a worker in another, for `serve`, `tune` and `estimate`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import uvicorn
from fastapi import FastAPI

from service import logs
from service.access import has_admin
from service.api import create_app
from service.api.connections import PatientProtocol, raise_limit
from service.api.context import Context
from service.api.guard import is_loopback
from service.cli.output import say
from service.cli.pace import run_for_long
from service.db import connect, reading, upgrade
from service.deaths import DEATHS_SECONDS, MOST_DEATHS_OF_A_PROCESS, Deaths
from service.errors import Misconfigured
from service.settings import Settings
from service.worker_command import WORKER

END_SECONDS = 10
BACKLOG = 128  # connections that wait to be accepted


class Server(uvicorn.Server):
    """uvicorn's server, which at its end first lets go who waits for news: they would hold it until its timeout."""

    def __init__(self, config: uvicorn.Config) -> None:
        run_for_long()
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the waiting, then all connections."""
        app = cast(FastAPI, self.config.app)
        await cast(Context, app.state.context).watch.close()
        await super().shutdown(sockets)


class LocalWorker:
    """One worker process, in a session of its own, so that Ctrl-C reaches it through this process only.

    It holds the read end of a pipe and ends when this process does, however that happens. It prints where this does.
    """

    def __init__(self, settings: Settings, log_level: logs.Level = "warning") -> None:
        read, self._lifeline = os.pipe()
        command = [*WORKER, "--lifeline", str(read)]
        private = ("DYNOTUNE_SERVER", "DYNOTUNE_KEY", "DYNOTUNE_ADMIN_KEY")  # meant for other processes
        environment = {name: value for name, value in os.environ.items() if name not in private} | {
            "DYNOTUNE_DATABASE_URL": settings.database_url,
            "DYNOTUNE_DATA_ROOTS": os.pathsep.join(map(str, settings.data_roots)),
            "DYNOTUNE_LOG_LEVEL": log_level,
        }
        self.process = subprocess.Popen(
            command, pass_fds=(read,), start_new_session=True, stdin=subprocess.DEVNULL, env=environment
        )
        os.close(read)

    def check(self) -> None:
        """Exit with a sentence when the worker has ended by itself, since its tasks would never be done."""
        if self.process.poll() is not None:
            raise SystemExit(f"dynotune: {ending(self.process.returncode)}")

    def stop(self) -> None:
        """End the worker; a trial under way is handed back to the queue."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.send_signal(signal.SIGINT)  # the second signal: do not finish the trial under way
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
        os.close(self._lifeline)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def ending(code: int) -> str:
    """How the local worker ended, by its exit code (minus the number of a signal), and where its output is."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "ended by itself"
    return f"the local worker {how} (exit code {code}); what it printed is above"


class Supervisor:
    """Keeps a local worker running: says how it died, and starts another after a pause that doubles with each death.

    Gives up after MOST_DEATHS_OF_A_PROCESS deaths within DEATHS_SECONDS: then `gave_up` is true, and `end` is called
    from a thread. A worker that ended in order (exit code 0) was told to, so it is not started again.
    """

    def __init__(self, settings: Settings, end: Callable[[], None]) -> None:
        self.gave_up = False
        self._settings, self._end = settings, end
        self._lock, self._stopping = threading.Lock(), threading.Event()
        self._worker = LocalWorker(settings, settings.log_level)
        self._thread = threading.Thread(target=self._watch, name="local worker", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        deaths = Deaths()
        while (code := self._worker.process.wait()) != 0 and not self._stopping.is_set():
            if (pause := deaths.pause()) is None:
                say(
                    f"{ending(code)}; that was the {MOST_DEATHS_OF_A_PROCESS}th time within {DEATHS_SECONDS:.0f} s, so "
                    "the control plane ends too: see `dynotune doctor`, or leave the worker out by "
                    "`dynotune serve --no-worker`"
                )
                self.gave_up = True
                self._end()
                return
            say(f"{ending(code)}; another is started in {pause:g} s")
            self._stopping.wait(pause)
            with self._lock:
                if self._stopping.is_set():
                    return
                self._worker.stop()
                self._worker = LocalWorker(self._settings, self._settings.log_level)
        if not self._stopping.is_set():
            say(f"{ending(code)}; it was told to end, so no other is started")

    def stop(self) -> None:
        """End the worker for good."""
        with self._lock:
            self._stopping.set()
        self._worker.stop()
        self._thread.join()


@contextlib.contextmanager
def control_plane(settings: Settings) -> Iterator[str]:
    """Run the API in a thread, on a free port of the loopback address; yields its URL."""
    upgrade(settings.database_url)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(
        create_app(settings),
        http=PatientProtocol,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=END_SECONDS,
    )
    server = Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="api")
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield url
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def _must_have_a_key(settings: Settings, host: str) -> None:
    """Misconfigured where requests need an API key and there is none to begin with."""
    if settings.admin_key or (is_loopback(host) and not settings.require_keys):
        return
    engine = connect(settings.database_url)
    with reading(engine) as session:
        there = has_admin(session)
    engine.dispose()
    if not there:
        raise Misconfigured(
            f"Listening on {host} needs API keys, and there is none that may do everything: make one by `dynotune keys "
            "create NAME --scope admin`, or put one into DYNOTUNE_ADMIN_KEY."
        )


def _must_be_free(host: str, port: int) -> None:
    """Misconfigured where nobody can listen on the port, as where somebody else does."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
            tried.listen()
    except OSError as error:
        raise Misconfigured(
            f"Port {port} of {host} cannot be listened on: {error.strerror}; choose others with --host and --port."
        ) from error


def serve(settings: Settings, host: str, port: int, worker: bool, ready: Callable[[], None] = lambda: None) -> bool:
    """Run the API in the foreground until SIGTERM or Ctrl-C, with a local worker unless `worker` is false.

    `ready` is called once the port is known to be free. Returns False when the API could not start, or when the local
    worker was given up. Misconfigured where it would listen beyond the loopback address, and there are no API keys; and
    where it cannot listen at all.
    """
    upgrade(settings.database_url)
    _must_have_a_key(settings, host)
    _must_be_free(host, port)
    ready()
    raise_limit()
    logs.show(settings.log, settings.log_level)
    # uvicorn raises the signal again after its own shutdown; sys.exit then runs the `finally` that ends the worker.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = uvicorn.Config(
        create_app(settings, host, prunes_uploads=True),
        host=host,
        port=port,
        http=PatientProtocol,
        log_config=None,
        access_log=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=END_SECONDS,
    )
    server = Server(config)

    def end() -> None:
        server.should_exit = True

    local = Supervisor(settings, end) if worker else None
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.run()
    finally:
        if local is not None:
            local.stop()
    return server.started and not (local and local.gave_up)
