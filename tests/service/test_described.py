"""Schemathesis over the whole description of the API: whatever is sent, no answer is a failure or undescribed.

Bodies and parameters are drawn from the description, both such as it allows and such as it forbids; every second
request names a job, a trial and a worker that are there. `make chaos` draws many more.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from sqlalchemy import Engine

from service import access
from service.access import Scope
from service.contract.job import JobSpec
from service.queue import Queue
from service.settings import Settings
from tests.service.conftest import here
from tests.service.test_api import run_trial

LONG = os.environ.get("DYNOTUNE_CHAOS") == "1"
EXAMPLES = 300 if LONG else 4  # of each operation and kind of data
CHECKED = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")


@pytest.fixture
def client(settings: Settings, engine: Engine, key: Scope | None) -> Iterator[TestClient]:
    """An API that asks for keys, and a caller who has such a one."""
    app = here(settings.model_copy(update={"require_keys": True, "rate_limit": ""}), raises=False)
    if key is not None:
        app.headers["Authorization"] = f"Bearer {access.create(engine, 'caller', [key])}"
    with app as client:
        yield client


@pytest.mark.timeout(3600 if LONG else 120)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("key", [None, Scope.admin])
def test_no_answer_is_a_failure_or_undescribed(
    client: TestClient, queue: Queue, facts: Callable[..., Any], job: Callable[..., Any], key: Scope | None
) -> None:
    described = schemathesis.openapi.from_dict(client.app.openapi())  # type: ignore[attr-defined]
    queue.register("w", 1, facts())
    operations = [found.ok() for found in described.get_all_operations()]  # type: ignore[union-attr]
    found = [_there(queue, job()) for _ in operations]  # for each its own, as it may be deleted
    for operation, there in zip(operations, found, strict=True):
        _exercise(operation, GenerationMode.POSITIVE, client, there)
        with contextlib.suppress(Unsatisfiable):  # where nothing is sent, nothing can be wrong
            _exercise(operation, GenerationMode.NEGATIVE, client, there)


def _there(queue: Queue, job: dict[str, Any]) -> dict[str, str]:
    """What there is by the names of paths' parameters: a job that has ended, and its trial."""
    job_id = queue.submit(JobSpec.model_validate(job))
    trial = run_trial(queue, 8.0, 1)
    queue.stop(job_id)
    return {"job_id": job_id, "trial_id": trial, "worker_id": "w"}


def _exercise(operation: Any, mode: GenerationMode, client: TestClient, there: dict[str, str]) -> None:
    @given(case=operation.as_strategy(generation_mode=mode), real=st.booleans())
    @hypothesis.settings(
        max_examples=EXAMPLES,
        derandomize=not LONG,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def sent(case: Any, real: bool) -> None:
        if real:
            case.path_parameters |= {name: there[name] for name in case.path_parameters if name in there}
        asked = case.as_transport_kwargs(base_url=str(client.base_url))
        asked.pop("cookies", None)
        # The client encodes text as ASCII only, while a header may hold any byte (RFC 9110, 5.5).
        asked["headers"] = {name: value.encode("latin-1") for name, value in (asked.get("headers") or {}).items()}
        if isinstance(asked.get("data"), str | bytes):
            asked["content"] = asked.pop("data")
        answer = client.request(**asked)
        case.validate_response(answer, checks=CHECKS.get_by_names(CHECKED))

    sent()
