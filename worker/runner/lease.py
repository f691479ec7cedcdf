"""Keeps a claim alive: renews it in the background, and says when its task must end and why."""

from __future__ import annotations

import threading
from types import TracebackType

from service.broker import Broker, BrokerUnavailable
from service.contract.task import WISH_SECONDS, Claim, Wish
from service.errors import LeaseLost


class Lease:
    """A context around one claimed task.

    `over` is set when the task must end: by a cancel, a stop, a lost lease, `end`, or an error of the renewing itself,
    which is then in `failure`.
    """

    def __init__(self, broker: Broker, claim: Claim) -> None:
        self._broker, self._claim = broker, claim
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
        """Say what the task is doing; the next renewal passes it on."""
        self.progress = progress

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
            except BrokerUnavailable:
                continue  # the lease lasts through a short outage; the next renewal tries again
            except Exception as error:  # noqa: BLE001 - the worker's thread raises it: the task ends with this reason
                self.failure = error
            if self.lost or self.wish is not None or self.failure is not None:
                self.over.set()
                return
