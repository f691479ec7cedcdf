"""The queue with the calls of workers made over HTTP, so that both forms of the broker pass the same tests."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import Engine

from service.api import create_app
from service.queue import Queue
from service.remote import RemoteBroker
from service.settings import Settings

CALLS = (
    "register",
    "leave",
    "claim",
    "renew",
    "plan_input",
    "finish_plan",
    "finish_trial",
    "finish_verify",
    "finish_estimate",
    "release",
    "fail",
)


@functools.cache
def _app() -> FastAPI:
    return create_app(Settings(database_url="sqlite:////nowhere/none.db"))


class OverHttp(Queue):
    """The queue on an engine, whose worker's calls go through the API of a control plane on the same database."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        super().__init__(engine, **options)
        app = _app()  # made once, since making its routes takes longer than a test; each test has its own context
        app.state.context = replace(app.state.context, engine=engine, queue=Queue(engine, **options))
        http = TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)
        remote = RemoteBroker("http://127.0.0.1:8000", None, http)  # type: ignore[arg-type]
        for name in CALLS:
            setattr(self, name, getattr(remote, name))
