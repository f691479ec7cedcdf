"""Holds a claim: renews it in the background, and says when the task must end and why."""

from __future__ import annotations

import threading
from types import TracebackType

from sqlalchemy.exc import OperationalError

from service.broker import WISH_SECONDS, Broker, LeaseLost
from service.contract.task import Claim, Wish


class Lease:
    """A context around one claimed task. `over` is set by a cancel, a stop, a lost lease, or `end`."""

    def __init__(self, broker: Broker, claim: Claim) -> None:
        self._broker, self._claim = broker, claim
        self._stop = threading.Event()
        self.over = threading.Event()
        self.lost = False
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

    def end(self) -> None:
        """Have the task end: the worker is asked to go."""
        self.over.set()

    def _keep(self) -> None:
        """Renewing and looking for wishes are one write, every 2 s."""
        while not self._stop.wait(WISH_SECONDS):
            try:
                self.wish = self._broker.renew(self._claim, self.progress)
            except LeaseLost:
                self.lost = True
            except OperationalError:
                continue  # the lease lasts through a short outage of the database; the next beat tries again
            if self.lost or self.wish is not None:
                self.over.set()
                return
