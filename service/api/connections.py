"""Ends connections that keep the server waiting: uvicorn by itself waits for a request's head for ever."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_FILES = 1 << 16  # descriptors that are asked of the system: more than a control plane ever uses
HEAD_SECONDS = 10.0  # from the first byte of a request, or from a connection's begin, until its head is complete


def raise_limit() -> None:
    """Let this process open as many files as the system allows it: most systems begin with 1,024, for old programs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def most_connections() -> int:
    """How many connections may be open at a time: half of the files, as an upload needs one more, and the database."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES // 2 if soft == resource.RLIM_INFINITY else min(soft, MOST_FILES) // 2


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 in Python, which gives a client `HEAD_SECONDS` for the head of a request.

    Connections beyond `most_connections()` are closed at once: without free descriptors, asyncio could accept none, and
    would log that in a busy loop.
    """

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the head of the first request."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
        else:
            self._wait()

    def data_received(self, data: bytes) -> None:
        """Take what has come; wait for the rest of a head, and stop waiting once a request is at work."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        else:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


__all__ = ["PatientProtocol", "raise_limit"]
