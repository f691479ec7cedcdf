"""Webhooks do not hold up one another, nor the rest of the control plane: slow names, backlogs, revoked keys."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from service import access, messages, webhooks
from service.access import ANYBODY, Scope
from service.contract.job import JobSpec
from service.contract.states import JobStatus
from service.db import reading
from service.models import Webhook
from service.queue import Queue
from service.tuples import JobRow
from service.webhooks import AT_ONCE, Webhooks
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
        time.sleep(0.7)
        return looked_up(url, private)

    async def slowly(*given: Any) -> int:
        await asyncio.sleep(0.7)
        return await post(*given)

    post = webhooks.post
    monkeypatch.setattr(webhooks, "check", slow)
    monkeypatch.setattr(webhooks, "post", slowly)
    monkeypatch.setattr(webhooks, "TIMEOUT_SECONDS", 1.2)
    send(hooks)
    assert len(receiver.seen) == 1 and only(hooks).last_error is None
    assert not names[0].startswith("asyncio"), "the default pool has the threads of all else"


def test_a_receiver_that_hangs_holds_up_nobody_else(
    hooks: Webhooks, receiver: Receiver, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own next message waits; the others' are sent at every look."""
    hanging = hooks.create(receiver.url.replace("/hook", "/hang"), ANYBODY)
    good = hooks.create(receiver.url, ANYBODY)
    with Session(engine) as session, session.begin():
        session.add_all(
            messages.message(of, "webhook.test", {"at": at}, 0.0) for of in (hanging, good) for at in range(3)
        )
    later(engine)
    begun, post = list[str](), webhooks.post

    async def hang(message: Any, *given: Any) -> int:
        begun.append(message.webhook_id)
        if message.webhook_id == hanging:
            await asyncio.Event().wait()
        return await post(message, *given)

    monkeypatch.setattr(webhooks, "post", hang)
    monkeypatch.setattr(webhooks, "TIMEOUT_SECONDS", 60.0)

    async def three_looks() -> None:
        for _ in range(3):
            await hooks.begin()
            while good in hooks._sending:
                await asyncio.sleep(0.01)
        hooks._sending[hanging].cancel()

    asyncio.run(three_looks())
    assert len(receiver.seen) == 3 and begun.count(hanging) == 1


def test_a_backlog_is_sent_one_after_the_other_at_one_look(
    hooks: Webhooks, receiver: Receiver, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to a limit, so that others have their turn; not where the receiver refuses one."""
    monkeypatch.setattr(webhooks, "IN_A_ROW", 4)
    made = [hooks.create(receiver.url + path, ANYBODY) for path in ("", "?refuse")]
    with Session(engine) as session, session.begin():
        session.add_all(messages.message(of, "webhook.test", {"at": at}, 0.0) for of in made for at in range(6))
    later(engine)
    sent, post = list[str](), webhooks.post

    async def answer(message: Any, *given: Any) -> int:
        sent.append(message.webhook_id)
        return 500 if message.url.endswith("refuse") else await post(message, *given)

    monkeypatch.setattr(webhooks, "post", answer)
    asyncio.run(hooks._round())
    assert [sent.count(one) for one in made] == [4, 1]
    asyncio.run(hooks._round())
    assert [sent.count(one) for one in made] == [6, 2]


def test_what_is_due_at_the_end_is_sent_after_what_is_being_sent(
    hooks: Webhooks, receiver: Receiver, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = hooks.create(receiver.url, ANYBODY)
    with Session(engine) as session, session.begin():
        session.add_all(messages.message(made, "webhook.test", {"at": at}, 0.0) for at in range(2))
    later(engine)
    post, go_on = webhooks.post, asyncio.Event()

    async def slow(*given: Any) -> int:
        await go_on.wait()
        return await post(*given)

    monkeypatch.setattr(webhooks, "post", slow)

    async def end() -> None:
        await hooks.begin()
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        await hooks.send()

    asyncio.run(end())
    assert len(receiver.seen) == 2


def test_webhooks_take_turns(hooks: Webhooks, engine: Engine) -> None:
    """One owner's webhooks, each with many old messages, leave room for another's."""
    busy, other = [f"{at:032x}" for at in range(AT_ONCE)], "f" * 32
    with Session(engine) as session, session.begin():
        for one in (*busy, other):
            session.add(Webhook(id=one, url="http://127.0.0.1:1/", owner="ann", created_at=1.0))
            session.flush()
            session.add_all(messages.message(one, "webhook.test", {"id": one}, 1.0) for _ in range(3))
    first = hooks.due()
    assert {one.webhook_id for one in first} == set(busy)
    for message in first:
        hooks.sent(message, 200, None)
    assert other in {one.webhook_id for one in hooks.due()}


def test_a_webhook_that_is_ended_while_a_job_ends_keeps_no_message(hooks: Webhooks, engine: Engine) -> None:
    key = access.create(engine, "ann", [Scope.submit])
    with reading(engine) as session:
        ann = access.caller(session, key)
    assert ann is not None
    hooks.create("http://127.0.0.1:1/", ann)
    ended = JobRow("j", "test", {}, JobStatus.running, owner="ann", created_at=1.0)
    revoking = threading.Thread(target=access.revoke, args=(engine, ann.id))
    with Session(engine) as session, session.begin():
        messages.announce(session, ended, JobStatus.succeeded, None, 1.0)
        session.flush()
        revoking.start()
        revoking.join(1.0)
        assert revoking.is_alive(), "it waits for the messages that are being written"
    revoking.join()
    assert only(hooks).disabled_at and only(hooks).waiting == 0


def test_a_receiver_that_works_again_is_sent_what_waits(
    hooks: Webhooks, receiver: Receiver, engine: Engine, queue: Queue, job: Callable[..., dict[str, Any]]
) -> None:
    """Messages rest for up to a day after failures: a test sends the oldest, and the others follow a success."""
    made = hooks.create(receiver.url, ANYBODY)
    for _ in range(3):
        queue.cancel(queue.submit(JobSpec.model_validate(job())))
    receiver.status = 500
    for _ in range(3):
        send(hooks)
    with engine.begin() as connection:  # after its second failure a message rests for minutes
        connection.exec_driver_sql("UPDATE deliveries SET attempts = 2, due_at = due_at + 1000")
    send(hooks)
    assert len(receiver.seen) == 3 and only(hooks).waiting == 3, "all of them rest"
    hooks.test(made, ANYBODY)
    send(hooks)
    assert len(receiver.seen) == 4 and only(hooks).waiting == 3, "it still fails"
    receiver.status = 204
    hooks.test(made, ANYBODY)
    for _ in range(3):
        send(hooks)
    assert only(hooks).waiting == 0 and len({headers["webhook-id"] for headers, _ in receiver.seen[4:]}) == 3
