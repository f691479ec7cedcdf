"""The control plane in this process and a worker beside it, for `serve` and `tune`; nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import uvicorn

from service.api import create_app
from service.db import upgrade
from service.settings import Settings

END_SECONDS = 10


class LocalWorker:
    """One worker process, in a session of its own so that Ctrl-C reaches it through us.

    It holds the read end of a pipe: when we end, whatever way, it does too.
    """

    def __init__(self, settings: Settings) -> None:
        read, self._lifeline = os.pipe()
        command = [sys.executable, "-m", "worker", "--lifeline", str(read)]
        environment = os.environ | {
            "DYNOTUNE_DATABASE_URL": settings.database_url,
            "DYNOTUNE_DATA_ROOTS": os.pathsep.join(map(str, settings.data_roots)),
        }
        self.process = subprocess.Popen(
            command, pass_fds=(read,), start_new_session=True, stdin=subprocess.DEVNULL, env=environment
        )
        os.close(read)

    def stop(self, now: bool) -> None:
        """End it: after the trial in hand, or `now`, which hands the trial back."""
        if self.process.poll() is None:
            self.process.terminate()
            if now:
                self.process.send_signal(signal.SIGINT)  # the second signal: do not finish the trial in hand
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(END_SECONDS)
        os.close(self._lifeline)
        if now and self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def control_plane(settings: Settings) -> Iterator[str]:
    """The API on a free loopback port, in a thread; its URL."""
    upgrade(settings.database_url)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(
        create_app(settings), log_level="warning", access_log=False, timeout_graceful_shutdown=END_SECONDS
    )
    server = uvicorn.Server(config)
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


def serve(settings: Settings, host: str, port: int, worker: bool) -> None:
    """The API in the foreground until SIGTERM or Ctrl-C, with a local worker unless told otherwise."""
    upgrade(settings.database_url)
    # uvicorn raises the signal again once it has shut down: then it ends us in order, the worker included.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    local = LocalWorker(settings) if worker else None
    try:
        uvicorn.run(
            create_app(settings),
            host=host,
            port=port,
            log_level="info",
            access_log=False,
            timeout_graceful_shutdown=END_SECONDS,
        )
    finally:
        if local is not None:
            local.stop(now=True)
