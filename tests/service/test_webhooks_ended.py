"""Webhooks that have ended: with their owner's keys, and without holding up others."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from service import access, messages
from service.access import ANYBODY, Scope
from service.db import reading
from service.models import Webhook
from service.webhooks import AT_ONCE, Webhooks
from tests.service.test_webhooks import KEY, Clock, later


@pytest.fixture
def hooks(engine: Engine) -> Webhooks:
    """The webhooks of a control plane that may send to this machine."""
    return Webhooks(engine, lambda: KEY, private=True, clock=Clock())


def test_revoking_keys_ends_what_they_may_no_longer_see(hooks: Webhooks, engine: Engine) -> None:
    keys = [access.create(engine, "ann", [scope]) for scope in (Scope.admin, Scope.submit)]
    callers = []
    for key in keys:
        with reading(engine) as session:
            callers.append(access.caller(session, key))
    admin, submitter = callers
    assert admin is not None and submitter is not None
    of_all, of_own = (hooks.create("http://127.0.0.1:1/", one) for one in (admin, submitter))

    def ended() -> dict[str, bool]:
        return {one.id: one.disabled_at is not None for one in hooks.listed(ANYBODY)}

    hooks.test(of_all, submitter)
    hooks.test(of_own, admin)
    with reading(engine) as session:
        assert session.get(Webhook, of_all).sees is None, "it has not ended, so nothing is changed by a test"  # type: ignore[union-attr]
    access.revoke(engine, admin.id)
    assert ended() == {of_all: True, of_own: False}
    later(engine)
    assert [one.webhook_id for one in hooks.due()] == [of_own], "a message of an ended one waits no more"
    hooks.test(of_all, submitter)
    with reading(engine) as session:
        assert [session.get(Webhook, one).sees for one in (of_all, of_own)] == ["ann", "ann"]  # type: ignore[union-attr]
    access.revoke(engine, submitter.id)
    assert ended() == {of_all: True, of_own: True}


def test_ended_webhooks_hold_up_no_others(hooks: Webhooks, engine: Engine) -> None:
    """More of them than are looked at in a round, with messages that are due."""
    ids = [f"{at:032x}" for at in range(AT_ONCE + 1)]
    with Session(engine) as session, session.begin():
        for one in ids:
            ended = None if one == ids[-1] else 1.0
            session.add(Webhook(id=one, url="http://127.0.0.1:1/", owner="ann", created_at=1.0, disabled_at=ended))
            session.flush()
            session.add(messages.message(one, "webhook.test", {"id": one}, 1.0))
    assert [one.webhook_id for one in hooks.due()] == [ids[-1]]
