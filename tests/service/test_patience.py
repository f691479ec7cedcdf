"""After an outage the tasks of workers that could not renew their leases are not taken from them at once."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy.exc import OperationalError

from service.api import app
from service.patience import Patience, since_boot
from service.queue import Queue
from service.settings import Settings
from tests.service.conftest import here


def test_patience_lasts_a_lease_after_each_outage() -> None:
    now = [1000.0]
    patience = Patience(30.0, lambda: now[0])
    assert patience.is_over(), "of a worker whose queue has always answered"
    patience.begin()
    for at in (1010.0, 1020.0, 1029.0):
        now[0] = at
        patience.go_on()
        assert not patience.is_over()
    now[0] = 1031.0
    patience.go_on()
    assert patience.is_over()
    now[0] = 1069.0  # this process, and with it the API, stood still for more than a lease
    patience.go_on()
    assert not patience.is_over()
    for at in (1079.0, 1089.0, 1099.0):
        now[0] = at
        patience.go_on()
    assert patience.is_over()


def test_a_control_plane_that_starts_leaves_workers_the_time_of_a_lease(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could not renew while it was away, as in an upgrade."""
    reaped, patient = threading.Event(), Patience(0.5)
    begun: list[bool] = []
    looked = threading.Event()
    go_on = Patience.go_on

    def looks(one: Patience) -> None:
        go_on(one)
        begun.append(one.is_over())
        looked.set()

    monkeypatch.setattr(Patience, "go_on", looks)
    monkeypatch.setattr(Queue, "reap", lambda _: reaped.set())
    monkeypatch.setattr(app, "REAP_SECONDS", 0.01)
    monkeypatch.setattr(app, "Patience", lambda: patient)
    with here(settings):
        assert looked.wait(20) and begun[0] is False
        assert reaped.wait(20)
    assert begun[0] is False and begun[-1] is True


def test_an_outage_that_goes_on_while_there_is_patience_begins_it_anew(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is asked meanwhile, or the first look after the patience would be the first after the outage."""
    patient, reaped = Patience(0.2), threading.Event()
    failed: list[float] = []
    done: list[float] = []

    def ask(_: Queue) -> None:
        if len(failed) < 40:
            failed.append(since_boot())
            raise OperationalError("SELECT 1", {}, Exception("away"))

    def reap(_: Queue) -> int:
        done.append(since_boot())
        reaped.set()
        return 0

    monkeypatch.setattr(Queue, "ask", ask)
    monkeypatch.setattr(Queue, "reap", reap)
    monkeypatch.setattr(app, "REAP_SECONDS", 0.01)
    monkeypatch.setattr(app, "Patience", lambda: patient)
    with here(settings):
        assert reaped.wait(60)
    assert len(failed) == 40 and done[0] - failed[-1] >= 0.2
