"""Work in threads that a process does not wait for when it ends, as it does for those of a pool."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_daemon(work: Callable[[], Result], name: str) -> Future[Result]:
    """What `work` returns or raises, as it does so in a daemon thread of that name.

    RuntimeError where no thread can be started. The work goes on when nobody waits for its result any more.
    """
    found: Future[Result] = Future()
    found.set_running_or_notify_cancel()  # so that whoever gives up waiting cannot cancel it

    def run() -> None:
        try:
            found.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised where the result is waited for
            found.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return found
