"""Keeps a claim alive: renews its lease in the background, and says when its task must end and why."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from service.broker import Broker
from service.contract.task import WISH_SECONDS, Claim, Wish
from service.errors import BrokerUnavailable, LeaseLost, OtherVersion
from service.patience import Patience


class Lease:
    """A context around one claimed task.

    The event `over` is set when the task must end: because the user cancels or stops the job, because the lease is
    lost, because `end` was called, or because a renewal raised an error, which `failure` then is. Each renewal hands on
    what the task is doing and, where that is more than the last one had, what it has `printed`. When a renewal
    fails, the worker takes over no other worker's tasks for a while (`patience`), as others could not renew either.
    """

    def __init__(self, broker: Broker, claim: Claim, printed: Callable[[], str], patience: Patience) -> None:
        self._broker, self._claim, self._printed, self._patience = broker, claim, printed, patience
        self._sent = ""  # the printed text that was handed on last
        self._stop = threading.Event()
        self.over = threading.Event()
        self.lost = False
        self.failure: Exception | None = None
        self.wish: Wish | None = None
        self.progress: str | None = None
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def show(self, progress: str) -> None:
        """Set the text that says what the task is doing; the next renewal writes it to the queue."""
        self.progress = progress

    def end(self) -> None:
        """Have the task end, because the worker was told to end at once."""
        self.over.set()

    def _keep(self) -> None:
        """Renew the lease every WISH_SECONDS until the context ends; the same write reads what the user wishes."""
        while not self._stop.wait(WISH_SECONDS):
            self._patience.go_on()
            try:
                self.wish = self._renew()
            except LeaseLost:
                self.lost = True
            except (BrokerUnavailable, OtherVersion):
                self._patience.begin()
                continue  # the lease lasts through a short outage; the next renewal tries again
            except Exception as error:  # noqa: BLE001 - kept in `failure`, which the worker's main thread raises
                self.failure = error
            if self.lost or self.wish is not None or self.failure is not None:
                self.over.set()
                return

    def _renew(self) -> Wish | None:
        log = self._printed()
        wish = self._broker.renew(self._claim, self.progress, log if log not in ("", self._sent) else None)
        self._sent = log or self._sent
        return wish
