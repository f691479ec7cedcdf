"""The Python client: what it asks for, and its patience with a control plane that is away for a while."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from service import client as module
from service.client import Client, Refused, Unreachable
from tests.cli.test_output import job_view


def client_of(monkeypatch: pytest.MonkeyPatch, answers: list[Any]) -> tuple[Client, list[str]]:
    """A client that gets these answers in turn (a status, a body, or an error), and the paths that it asked for."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.raw_path.decode())
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        if isinstance(found, int):
            problem = {"type": "x", "title": "t", "status": found, "code": "c", "detail": f"answer {found}"}
            return httpx.Response(found, json=problem)
        if isinstance(found, str):
            return httpx.Response(200, text=found)
        return httpx.Response(200, json=found)

    client = Client("http://127.0.0.1:1")
    monkeypatch.setattr(client, "_http", httpx.Client(base_url=client.url, transport=httpx.MockTransport(answer)))
    return client, asked


def job(status: str) -> Any:
    return json.loads(job_view(status=status).model_dump_json())


def test_waiting_outlasts_a_restart_of_the_control_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind a proxy, which says 502 or 504 meanwhile, and under a limit of requests, 429."""
    away = httpx.ConnectError("refused")
    client, _ = client_of(
        monkeypatch, [job("running"), away, 503, 502, 504, 429, away, job("running"), job("succeeded")]
    )
    assert client.wait("j", seconds=0).status == "succeeded"


def test_waiting_ends_when_nobody_has_ever_answered_or_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = client_of(monkeypatch, [httpx.ConnectError("refused")])
    with pytest.raises(Unreachable):
        client.wait("j", seconds=0)
    client, _ = client_of(monkeypatch, [job("running"), httpx.ConnectError("refused")])
    with pytest.raises(Unreachable):
        client.wait("j", seconds=0, patience=-1)
    client, _ = client_of(monkeypatch, [job("running"), 404])
    with pytest.raises(Refused, match="answer 404"):
        client.wait("j", seconds=0)


def test_an_id_leads_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    client, asked = client_of(monkeypatch, [404])
    with pytest.raises(Refused):
        client.export("a?c", "d#e")
    assert asked == ["/v1/jobs/a%3Fc/exports/d%23e"]


def test_an_id_with_a_slash_is_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server takes a quoted slash for a slash, and would answer with what lies below the job."""
    client, asked = client_of(monkeypatch, [])
    for use, said in (
        (lambda: client.job("j/trials"), "There is no job 'j/trials'."),
        (lambda: client.job(".."), "There is no job '..'."),
        (lambda: client.export("j", "a/b"), "There is no export 'a/b'."),
        (lambda: client.drain("w/x"), "There is no worker 'w/x'."),
        (lambda: client.trial("t/x"), "There is no trial 't/x'."),
        (lambda: client.test_webhook("h/x"), "There is no webhook 'h/x'."),
    ):
        with pytest.raises(Refused) as refused:
            use()
        assert str(refused.value) == said and refused.value.problem.status == 404
    assert not asked


def test_only_files_are_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A pipe would be waited for, and a device read, for ever."""
    client, asked = client_of(monkeypatch, [])
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            client.upload(path)
    assert not asked


def happened(seq: int) -> dict[str, Any]:
    return {"seq": seq, "at": 1.0, "kind": "submitted", "data": {}}


def test_all_events_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVENTS_A_PAGE", 2)
    pages = [{"items": [happened(seq) for seq in page]} for page in ((5, 6), (7, 9), (10,))]
    client, asked = client_of(monkeypatch, pages)
    assert [event.seq for event in client.events("j", after=4)] == [5, 6, 7, 9, 10]
    assert [path.partition("?")[2] for path in asked] == [f"after={seq}&limit=2" for seq in (4, 6, 9)]


def test_following_goes_on_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0)

    def stream(*seqs: int) -> str:
        return "".join(f"id: {seq}\nevent: submitted\ndata: {json.dumps(happened(seq))}\n\n" for seq in seqs)

    left = {"items": [happened(4)]}
    answers = [stream(1, 2), job("running"), stream(3), job("succeeded"), left]
    client, asked = client_of(monkeypatch, answers)
    assert [event.seq for event in client.follow("j")] == [1, 2, 3, 4]
    assert asked[2] == "/v1/jobs/j/events/stream?after=2" and asked[4].startswith("/v1/jobs/j/events?after=3")
    client, _ = client_of(monkeypatch, [stream(1), httpx.ConnectError("refused"), job("succeeded"), {"items": []}])
    assert [event.seq for event in client.follow("j")] == [1], "asked again while it starts anew"
    broken = [stream(1), job("running"), httpx.ConnectError("refused"), job("running"), 503, job("running"), stream(2)]
    client, _ = client_of(monkeypatch, [*broken, job("succeeded"), {"items": []}])
    assert [event.seq for event in client.follow("j")] == [1, 2], "the old one answered before it ended itself"
    away = [httpx.ConnectError("refused")] * (module.TRIES + 1)
    for answers, error in (([401], Refused), (away, Unreachable)):
        client, _ = client_of(monkeypatch, [stream(1), *answers])
        with pytest.raises(error):
            list(client.follow("j"))
    for answer, error in ((404, Refused), (httpx.ConnectError("refused"), Unreachable)):
        client, asked = client_of(monkeypatch, [answer])
        with pytest.raises(error):
            list(client.follow("j"))
        assert len(asked) == 1, "what never answered is not waited for"


@pytest.mark.parametrize("host", ["xn--", "xn--a", "a..b", "a" * 70 + ".example"])
def test_a_name_that_no_host_can_have(host: str) -> None:
    with Client(f"http://{host}/") as client:
        for ask in (client.workers, lambda: list(client.follow("j"))):
            with pytest.raises(Unreachable, match="is not a URL"):
                ask()


def test_a_proxy_that_takes_no_large_bodies_is_told_as_one(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    page = httpx.MockTransport(lambda _: httpx.Response(413, text="<html>413</html>"))
    with Client("http://proxy") as client:
        client._http = httpx.Client(transport=page, base_url="http://proxy")
        with pytest.raises(Refused, match="413 from http://proxy/v1/datasets: a proxy before it takes no bodies"):
            client.upload(tmp_path / "data.jsonl")
