"""Webhooks do not hold up one another, nor the rest of the control plane: slow names, and backlogs."""

from __future__ import annotations

import threading
import time

import pytest
from sqlalchemy import Engine

from service import webhooks
from service.access import ANYBODY
from service.webhooks import Webhooks
from tests.service.test_webhooks import KEY, Clock, Receiver, later, only, receiver, send

__all__ = ["receiver"]  # the fixture


@pytest.fixture
def hooks(engine: Engine) -> Webhooks:
    """The webhooks of a control plane that may send to this machine."""
    return Webhooks(engine, lambda: KEY, private=True, clock=Clock())


def test_a_slow_look_up_takes_no_thread_of_others_and_no_time_of_the_attempt(
    hooks: Webhooks, receiver: Receiver, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks.test(hooks.create(receiver.url, ANYBODY), ANYBODY)
    later(engine)
    looked_up, names = webhooks.check, list[str]()

    def slow(url: str, private: bool) -> str:
        names.append(threading.current_thread().name)
        time.sleep(1.5)
        return looked_up(url, private)

    monkeypatch.setattr(webhooks, "check", slow)
    monkeypatch.setattr(webhooks, "TIMEOUT_SECONDS", 1.0)
    send(hooks)
    assert len(receiver.seen) == 1 and only(hooks).last_error is None
    assert not names[0].startswith("asyncio"), "the default pool has the threads of all else"
