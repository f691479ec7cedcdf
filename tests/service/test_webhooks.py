"""Webhooks: messages come signed, once, again after a failure, and never to a private address unless it is allowed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Engine
from standardwebhooks.webhooks import Webhook as Signer
from typer.testing import CliRunner

from service import access, webhooks
from service.access import ANYBODY, Scope
from service.cli.app import app
from service.client import Client
from service.contract.job import JobSpec
from service.contract.webhook import WebhookView
from service.db import reading
from service.errors import BadWebhook, NotFound, TooMany
from service.queue import Queue
from service.settings import Settings
from service.webhooks import RESTS, Webhooks, check, signing_secret
from tests.service.conftest import here

Make = Callable[..., dict[str, Any]]
KEY = b"a key of the control plane"


class Receiver:
    """A server on the loopback address, which keeps what it is sent and answers with `status`."""

    def __init__(self) -> None:
        self.status, self.seen = 204, list[tuple[dict[str, str], bytes]]()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.seen.append(({name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(outer.status)
                self.send_header("Location", "http://127.0.0.1:1/")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://localhost:{self.server.server_port}/hook?of=me"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver that listens."""
    made = Receiver()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


class Clock:
    """A clock that is moved by hand. PostgreSQL's own cannot be, so what is due is then moved instead."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hooks(engine: Engine) -> Webhooks:
    """Webhooks that may be sent to the loopback address."""
    return Webhooks(engine, lambda: KEY, private=True, clock=Clock())


def later(engine: Engine) -> None:
    """Let all rests pass."""
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE deliveries SET due_at = 0 WHERE due_at IS NOT NULL")


def send(hooks: Webhooks) -> None:
    """A round of sending."""
    asyncio.run(hooks.send())


def only(hooks: Webhooks) -> WebhookView:
    """The one webhook."""
    (found,) = hooks.listed(ANYBODY)
    return found


def test_the_end_of_a_job_is_told_once_and_signed(
    hooks: Webhooks, receiver: Receiver, queue: Queue, job: Make, engine: Engine
) -> None:
    made = hooks.create(receiver.url, ANYBODY)
    job_id = queue.submit(JobSpec.model_validate(job(labels={"team": "nlp"})))
    send(hooks)
    assert receiver.seen == [], "a job that goes on is no news"
    queue.cancel(job_id)
    later(engine)
    send(hooks)
    send(hooks)
    ((headers, body),) = receiver.seen
    told = Signer(webhooks.secret(KEY, made)).verify(body, headers)
    assert told["type"] == "job.cancelled" and set(told) == {"type", "timestamp", "data"}
    assert told["data"]["id"] == job_id and told["data"]["labels"] == {"team": "nlp"}
    assert headers["host"].startswith("localhost:") and headers["content-type"] == "application/json"
    found = only(hooks)
    assert (found.waiting, found.last_error, found.disabled_at) == (0, None, None) and found.last_tried_at


def test_what_was_not_received_is_sent_again_under_the_same_id(
    hooks: Webhooks, receiver: Receiver, engine: Engine
) -> None:
    made = hooks.create(receiver.url, ANYBODY)
    hooks.test(made, ANYBODY)
    later(engine)
    receiver.status = 302  # is not followed
    send(hooks)
    send(hooks)
    assert len(receiver.seen) == 1 and only(hooks).last_error == "it answered 302"
    receiver.status = 200
    later(engine)
    send(hooks)
    assert len({headers["webhook-id"] for headers, _ in receiver.seen}) == 1 and len(receiver.seen) == 2
    assert only(hooks).waiting == 0 and only(hooks).last_error is None


def test_after_the_last_rest_a_message_is_given_up(hooks: Webhooks, receiver: Receiver, engine: Engine) -> None:
    made = hooks.create(receiver.url, ANYBODY)
    hooks.test(made, ANYBODY)
    receiver.status = 500
    for _ in range(len(RESTS) + 5):
        later(engine)
        send(hooks)
    assert len(receiver.seen) == len(RESTS) + 1
    assert (only(hooks).waiting, only(hooks).last_error) == (0, "it answered 500")


def test_a_receiver_that_is_not_there(hooks: Webhooks, receiver: Receiver, engine: Engine) -> None:
    made = hooks.create("http://127.0.0.1:1/", ANYBODY)
    hooks.test(made, ANYBODY)
    later(engine)
    send(hooks)
    assert only(hooks).waiting == 1 and "connection" in (only(hooks).last_error or "")


def test_a_receiver_that_answers_410_is_left_alone_until_it_is_tested(
    hooks: Webhooks, receiver: Receiver, engine: Engine, queue: Queue, job: Make
) -> None:
    made = hooks.create(receiver.url, ANYBODY)
    for _ in range(2):
        queue.cancel(queue.submit(JobSpec.model_validate(job())))
    later(engine)
    other = hooks.due()  # the first message, which another control plane sends at the same time
    later(engine)
    receiver.status = 410
    send(hooks)
    assert only(hooks).disabled_at and only(hooks).waiting == 0
    hooks.sent(other[0], 500, None)
    assert only(hooks).waiting == 0, "it is not tried again"
    count = len(receiver.seen)
    queue.cancel(queue.submit(JobSpec.model_validate(job())))
    later(engine)
    send(hooks)
    assert len(receiver.seen) == count
    receiver.status = 200
    hooks.test(made, ANYBODY)
    with pytest.raises(TooMany, match="still to be delivered"):
        hooks.test(made, ANYBODY)
    later(engine)
    send(hooks)
    assert len(receiver.seen) == count + 1 and only(hooks).disabled_at is None


def test_each_webhook_gets_one_message_a_round(
    hooks: Webhooks, receiver: Receiver, engine: Engine, queue: Queue, job: Make
) -> None:
    many, few = hooks.create(receiver.url, ANYBODY), hooks.create("http://127.0.0.1:1/", ANYBODY)
    for _ in range(3):
        queue.cancel(queue.submit(JobSpec.model_validate(job())))
    later(engine)
    assert sorted(one.webhook_id for one in hooks.due()) == sorted((many, few))
    assert sorted(one.webhook_id for one in hooks.due()) == sorted((many, few))


def test_a_receiver_that_never_comes_to_an_end(
    hooks: Webhooks, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends a line of its head now and then, which no timeout of a read would notice."""
    monkeypatch.setattr(webhooks, "TIMEOUT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        ended = threading.Event()

        def drip() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                while not ended.wait(0.05):
                    connection.send(b"HTTP/1.1 200 OK\r\n" if not ended.is_set() else b"")

        thread = threading.Thread(target=drip)
        thread.start()
        stack.callback(thread.join)
        stack.callback(ended.set)
        hooks.test(hooks.create(f"http://127.0.0.1:{server.getsockname()[1]}/", ANYBODY), ANYBODY)
        later(engine)
        send(hooks)
    assert only(hooks).waiting == 1 and only(hooks).last_error


def test_whatever_goes_wrong_is_noted(hooks: Webhooks, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> int:
        raise UnicodeError("a mistake of ours")

    monkeypatch.setattr(webhooks, "post", broken)
    hooks.test(hooks.create("http://127.0.0.1:1/", ANYBODY), ANYBODY)
    later(engine)
    send(hooks)
    assert only(hooks).waiting == 1 and only(hooks).last_error == "a mistake of ours"


def test_two_control_planes_do_not_send_the_same(hooks: Webhooks, receiver: Receiver, engine: Engine) -> None:
    other = Webhooks(engine, lambda: KEY, private=True, clock=Clock())
    hooks.test(hooks.create(receiver.url, ANYBODY), ANYBODY)
    later(engine)
    assert len(hooks.due()) == 1 and other.due() == []


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1/", "private network"),
        ("http://localhost:8000/", "private network"),
        ("http://10.1.2.3/", "private network"),
        ("http://169.254.169.254/latest/meta-data/", "private network"),
        ("http://[::1]/", "private network"),
        ("http://[::ffff:10.0.0.1]/", "private network"),
        ("http://[64:ff9b::a00:1]/", "private network"),
        ("http://[2002:7f00:1::]/", "private network"),
        ("http://224.0.0.1/", "private network"),
        ("http://192.0.0.192/", "private network"),
        ("http://168.63.129.16/", "private network"),
        ("http://[fec0::1]/", "private network"),
        ("http://[64:ff9b:1::7f00:1]/", "private network"),
        ("http://[::7f00:1]/", "private network"),
        ("http://b\u00fccher.example/", "plain ASCII"),
        ("http://8.8.8.8/\x01", "plain ASCII"),
        ("http://0.0.0.0/", "private network"),
        ("http://2130706433/", "private network"),
        ("file:///etc/passwd", "http:// or https://"),
        ("https://", "http:// or https://"),
        ("https://me:secret@example.com/", "without a name"),
        ("https://example.com:99999/", "url: "),
        ("https://no-such-host.invalid/", "is not known"),
        ("not a url", "plain ASCII"),
    ],
)
def test_urls_that_are_not_sent_to(url: str, said: str) -> None:
    with pytest.raises(BadWebhook, match=said.replace("/", ".")):
        check(url, private=False)


def test_a_host_that_becomes_private_is_not_sent_to(
    engine: Engine, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is looked up again for every message."""
    public = [(2, 1, 6, "", ("93.184.216.34", 80))]
    strict = Webhooks(engine, lambda: KEY, private=False)
    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", lambda *_, **__: public)
        made = strict.create(receiver.url, ANYBODY)
    strict.test(made, ANYBODY)
    later(engine)
    send(strict)
    assert receiver.seen == [] and "private network" in (only(strict).last_error or "")


def test_a_host_that_is_never_found_does_not_keep_the_process(tmp_path: Path) -> None:
    """The resolver may try for a minute, while the control plane is told to end."""
    code = """
import asyncio, threading
from service import webhooks
webhooks.TIMEOUT_SECONDS, webhooks.check = 0.1, lambda *_: threading.Event().wait()
hooks = webhooks.Webhooks(None, lambda: b"", False)
try:
    asyncio.run(hooks._looked_up("https://example.com/"))
except webhooks.BadWebhook as problem:
    print(problem)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "its host was not found within" in done.stdout, done.stderr


def test_owners_see_their_own_and_hear_of_their_own(
    hooks: Webhooks, engine: Engine, queue: Queue, receiver: Receiver, job: Make
) -> None:
    def known(owner: str, scope: Scope) -> access.Caller:
        key = access.create(engine, owner, [scope])
        with reading(engine) as session:
            found = access.caller(session, key)
        assert found is not None
        return found

    anna, ben, boss = known("anna", Scope.submit), known("ben", Scope.submit), known("boss", Scope.admin)
    of_anna, of_boss = hooks.create(receiver.url, anna), hooks.create(receiver.url, boss)
    assert [one.id for one in hooks.listed(anna)] == [of_anna] and hooks.listed(ben) == []
    assert {one.id for one in hooks.listed(boss)} == {of_anna, of_boss}
    for refused in (hooks.delete, hooks.test):
        with pytest.raises(NotFound):
            refused(of_anna, ben)
    queue.cancel(queue.submit(JobSpec.model_validate(job()), ben))
    assert {one.id: one.waiting for one in hooks.listed(boss)} == {of_anna: 0, of_boss: 1}
    hooks.delete(of_anna, anna)
    hooks.delete(of_boss, boss)
    assert hooks.listed(boss) == [] and hooks.due() == []


def test_there_is_a_most(hooks: Webhooks, receiver: Receiver) -> None:
    for _ in range(webhooks.MOST):
        hooks.create(receiver.url, ANYBODY)
    with pytest.raises(TooMany, match="20"):
        hooks.create(receiver.url, ANYBODY)


def test_the_control_planes_secret(tmp_path: Path) -> None:
    first = signing_secret(None, tmp_path)
    assert signing_secret(None, tmp_path) == first and len(first) > 40
    assert (tmp_path / "webhook.key").stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["webhook.key"]
    assert signing_secret("given by a setting", tmp_path) == b"given by a setting"


def test_over_the_command_line(settings: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    with here(settings.model_copy(update={"webhook_private": True})) as api, Client() as client:
        client._http = api  # type: ignore[assignment]
        monkeypatch.setattr("service.cli.webhooks.connect", lambda _: contextlib.nullcontext(client))

        def said(*arguments: str) -> str:
            done = runner.invoke(app, ["webhooks", *arguments])
            assert done.exit_code == 0, done.output
            return done.output

        name, _, secret = said("add", receiver.url).strip().partition(": ")
        assert secret.startswith("whsec_") and json.loads(said("ls", "--json"))[0]["id"] == name
        assert "a test message" in said("test", name) and name in said("ls")
        assert "deleted" in said("rm", name) and json.loads(said("ls", "--json")) == []


def test_over_the_api(settings: Settings, receiver: Receiver) -> None:
    with here(settings.model_copy(update={"webhook_private": True})) as api:
        made = api.post("/v1/webhooks", json={"url": receiver.url})
        assert made.status_code == 201 and made.json()["secret"].startswith("whsec_")
        name = made.json()["id"]
        assert "secret" not in json.dumps(api.get("/v1/webhooks").json()), "it is shown once"
        assert api.post(f"/v1/webhooks/{name}/test").status_code == 204
        assert api.delete(f"/v1/webhooks/{name}").status_code == 204
        assert api.delete(f"/v1/webhooks/{name}").status_code == 404


def test_mistakes_over_the_api(api: TestClient) -> None:
    private = api.post("/v1/webhooks", json={"url": "http://127.0.0.1:9/"})
    assert (private.status_code, private.json()["code"]) == (422, "bad-webhook")
    assert "DYNOTUNE_WEBHOOK_PRIVATE" in private.json()["detail"]
    assert api.post("/v1/webhooks", json={}).status_code == 422
    assert api.post("/v1/webhooks", json={"url": "https://example.com", "more": 1}).status_code == 422
    assert api.post("/v1/webhooks/none/test").status_code == 404
