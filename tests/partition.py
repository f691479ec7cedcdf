"""A network between a worker and PostgreSQL that can be cut: what is sent then arrives nowhere, until it is mended."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from pathlib import Path

from sqlalchemy import make_url

CHUNK = 1 << 16


class Partition:
    """Forwards connections to the server of a database URL. `url` is the same database through this network."""

    def __init__(self, url: str) -> None:
        database = make_url(url)
        name = f".s.PGSQL.{database.query['port']}"
        self._server = str(Path(str(database.query["host"])) / name)
        self._folder = Path(tempfile.mkdtemp(prefix="cut-", dir="/tmp"))  # a socket's path has 100 characters at most
        self.url = database.update_query_dict({"host": str(self._folder)}).render_as_string()
        self._open, self._ends = threading.Event(), list[socket.socket]()
        self._open.set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / name))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Swallow everything: connections stay open, nothing comes through, and new ones are never answered."""
        self._open.clear()

    def mend(self) -> None:
        """End the connections that there were, as both sides' systems do in time, and forward new ones."""
        self._close()
        self._open.set()

    def end(self) -> None:
        """Close everything."""
        self._listener.close()
        self.mend()
        shutil.rmtree(self._folder)

    def _close(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                mine, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._server)
            self._ends += [mine, server]
            for source, target in ((mine, server), (server, mine)):
                threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                self._open.wait()
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
