"""A small typed client of the API.

with Client("http://127.0.0.1:8000") as client:
    job = client.submit({"model": {...}, "dataset": {...}})
    client.wait(job)
    print(client.recommendation(job).configuration)
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from service.contract import views
from service.contract.base import Contract
from service.contract.estimate import Estimate
from service.contract.job import IDEMPOTENCY_KEY, JobSpec
from service.contract.recommendation import Recommendation
from service.contract.states import EstimateStatus
from service.contract.webhook import WebhookList, WebhookMade, WebhookView
from service.errors import BodyTooLarge, Refused, Unreachable

__all__ = ["Client", "Refused", "Unreachable"]
Answer = TypeVar("Answer", bound=Contract)
TRIALS_A_PAGE, EVENTS_A_PAGE = 200, 1000  # that are asked for
# Seconds between attempts to reach a control plane that ended a stream, and the number of attempts before the last.
AGAIN_SECONDS, TRIES = 1.0, 15
PASSING = (429, 502, 503, 504)  # statuses that a later attempt may not get, for example while a service starts


class Client:
    """Speaks to one control plane, with an API key where it asks for one. Raises Unreachable or Refused."""

    def __init__(self, url: str = "http://127.0.0.1:8000", timeout: float = 30.0, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise Unreachable(f"{url} is not a URL: it has to begin with http:// or https://")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self._http = httpx.Client(base_url=self.url, timeout=timeout, headers=headers)
        except httpx.InvalidURL as error:
            raise Unreachable(f"{self.url} is not a URL ({error})") from error

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        with self._reaching():
            answer = self._http.request(method, path, **options)
        if answer.is_success:
            return answer
        raise self._refused(answer, path)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Unreachable where no control plane answers, or where the URL's host has a name that no host can have."""
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unreachable(f"no control plane answers at {self.url} ({error})") from error
        except UnicodeError as error:
            if getattr(error, "encoding", None) == "utf-8":  # it is what is asked for that is no text, not the URL
                raise
            raise Unreachable(f"{self.url} is not a URL ({error})") from error

    def _refused(self, answer: httpx.Response, path: str) -> Refused:
        try:
            return Refused(views.Problem.model_validate_json(answer.content))
        except ValidationError:  # a proxy, or another server
            said = f"{answer.status_code} from {self.url}{path}"
            if answer.status_code == BodyTooLarge.status:
                said += ": a proxy before it takes no bodies of this size"
            return Refused(_problem(answer.reason_phrase, said, answer.status_code))

    def _read(self, kind: type[Answer], answer: httpx.Response) -> Answer:
        try:
            return kind.model_validate_json(answer.content)
        except ValidationError as error:
            raise Unreachable(f"what answers at {self.url} is not a dynotune control plane of this version") from error

    def _get(self, kind: type[Answer], path: str, **parameters: Any) -> Answer:
        given = {name: value for name, value in parameters.items() if value is not None}
        return self._read(kind, self._call("GET", path, params=given))

    def submit(self, job: JobSpec | dict[str, Any] | str, idempotency_key: str | None = None) -> str:
        """Submit a job given as a JobSpec, a dictionary, or YAML text; its id.

        With an idempotency key, the same call again, as after a broken connection, gives the job of the first.
        """
        answer = self._call("POST", "/v1/jobs", **_body(job, idempotency_key))
        return self._read(views.JobState, answer).id

    def upload(self, file: Path) -> str:
        """Send a dataset's file; what a job names it by, as its `dataset.source`. OSError where it cannot be read."""
        if file.exists() and not file.is_file():  # a pipe or a device may have no end
            raise OSError(errno.EINVAL, "it is not a regular file", str(file))
        with file.open("rb") as data:
            query = {"name": file.name, "sha256": hashlib.file_digest(data, "sha256").hexdigest()}
        headers = {"Content-Type": "application/octet-stream"}
        with file.open("rb") as data:
            answer = self._call("POST", "/v1/datasets", params=query, content=data, headers=headers, timeout=None)
        return self._read(views.Upload, answer).source

    def check(self, job: JobSpec | dict[str, Any] | str) -> views.JobCheck:
        """What is known of a job without submitting it: its spec in full, and which workers could serve it."""
        return self._read(views.JobCheck, self._call("POST", "/v1/jobs:validate", **_body(job)))

    def clone(self, job_id: str, changes: dict[str, Any] | None = None) -> str:
        """Submit a job again, with changes to its spec as a JSON merge patch; the new job's id."""
        answer = self._call("POST", f"/v1/jobs/{_part(job_id)}/clone", json=changes or {})
        return self._read(views.JobState, answer).id

    def delete(self, job_id: str) -> None:
        """Delete a job that has ended."""
        self._call("DELETE", f"/v1/jobs/{_part(job_id)}")

    def drain(self, worker_id: str) -> None:
        """Have a worker end once its present task has ended."""
        self._call("POST", f"/v1/workers/{_part(worker_id, 'worker')}/drain")

    def add_webhook(self, url: str) -> WebhookMade:
        """Have a URL told when jobs end; the webhook's id, and the secret by which the receiver checks signatures."""
        return self._read(WebhookMade, self._call("POST", "/v1/webhooks", json={"url": url}))

    def webhooks(self) -> list[WebhookView]:
        """The caller's webhooks, the oldest first."""
        return self._get(WebhookList, "/v1/webhooks").items

    def test_webhook(self, webhook_id: str) -> None:
        """Have a test message sent."""
        self._call("POST", f"/v1/webhooks/{_part(webhook_id, 'webhook')}/test")

    def delete_webhook(self, webhook_id: str) -> None:
        """Delete a webhook."""
        self._call("DELETE", f"/v1/webhooks/{_part(webhook_id, 'webhook')}")

    def job(self, job_id: str) -> views.JobView:
        """Status, phase, progress, best so far."""
        return self._get(views.JobView, f"/v1/jobs/{_part(job_id)}")

    def jobs(
        self, status: str | None = None, label: str | None = None, name: str | None = None
    ) -> Iterator[views.JobSummary]:
        """All jobs, or those of a status, a label (`key=value`) or with that in their name; newest first."""
        cursor: str | None = None
        while True:
            page = self._get(views.JobPage, "/v1/jobs", status=status, label=label, name=name, cursor=cursor)
            yield from page.items
            cursor = page.next
            if cursor is None:
                return

    def trials(self, job_id: str) -> tuple[views.ListedTrial, ...]:
        """A job's trials, page by page."""
        found: tuple[views.ListedTrial, ...] = ()
        while page := self._get(
            views.TrialList,
            f"/v1/jobs/{_part(job_id)}/trials",
            after=found[-1].number if found else None,
            limit=TRIALS_A_PAGE,
        ).items:
            found += page
            if len(page) < TRIALS_A_PAGE:
                break
        return found

    def trial(self, trial_id: str) -> views.LoggedTrial:
        """One trial, with the end of its output."""
        return self._get(views.LoggedTrial, f"/v1/trials/{_part(trial_id, 'trial')}")

    def events(self, job_id: str, after: int = 0) -> tuple[views.EventView, ...]:
        """A job's events after a sequence number, page by page."""
        found: tuple[views.EventView, ...] = ()
        while True:
            path, last = f"/v1/jobs/{_part(job_id)}/events", found[-1].seq if found else after
            page = self._get(views.EventList, path, after=last, limit=EVENTS_A_PAGE).items
            found += page
            if len(page) < EVENTS_A_PAGE:
                return found

    def follow(self, job_id: str) -> Iterator[views.EventView]:
        """A job's events, as they happen, until it has ended.

        A stream that ends or breaks before that, as where the control plane is started again, is opened anew;
        Unreachable where none answers for some seconds.
        """
        seq = 0
        while True:
            try:
                for event in self._stream(job_id, seq):
                    yield event
                    seq = event.seq
            except (Unreachable, Refused) as error:
                if not seq or _is_lasting(error):  # every job has an event, so no stream has been opened yet
                    raise
            job = self._job_again(job_id)
            if job.status.ended:
                yield from self.events(job_id, seq)
                return
            time.sleep(AGAIN_SECONDS)

    def _job_again(self, job_id: str) -> views.JobView:
        """The job, from a control plane that may be starting anew."""
        for _ in range(TRIES):
            try:
                return self.job(job_id)
            except (Unreachable, Refused) as error:
                if _is_lasting(error):
                    raise
            time.sleep(AGAIN_SECONDS)
        return self.job(job_id)

    def _stream(self, job_id: str, after: int) -> Iterator[views.EventView]:
        headers, wanted = {"Accept": "text/event-stream"}, {"after": after}
        path, patience = f"/v1/jobs/{_part(job_id)}/events/stream", httpx.Timeout(30.0, read=60.0)
        stream = self._http.stream("GET", path, params=wanted, headers=headers, timeout=patience)
        with self._reaching(), stream as answer:
            if not answer.is_success:
                answer.read()
                raise self._refused(answer, path)
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    yield views.EventView.model_validate_json(line.removeprefix("data:"))

    def recommendation(self, job_id: str) -> Recommendation:
        """The answer, or the best so far (`final` says which)."""
        return self._get(Recommendation, f"/v1/jobs/{_part(job_id)}/recommendation")

    def export(self, job_id: str, name: str) -> str:
        """The recommendation as the text of an export, such as json, spec or train.py (docs/exports.md)."""
        return self._call("GET", f"/v1/jobs/{_part(job_id)}/exports/{_part(name, 'export')}").text

    def cancel(self, job_id: str) -> None:
        """End a job now."""
        self._call("POST", f"/v1/jobs/{_part(job_id)}/cancel")

    def stop(self, job_id: str) -> None:
        """End a job now with the best so far."""
        self._call("POST", f"/v1/jobs/{_part(job_id)}/stop")

    def waterfall(self, job_id: str) -> views.Waterfall:
        """What each lever of the best configuration so far brings; NotYet before there is one."""
        return self._get(views.Waterfall, f"/v1/jobs/{_part(job_id)}/waterfall")

    def pareto(self, job_id: str) -> views.Pareto:
        """The trials that none beats in both tokens/s and memory."""
        return self._get(views.Pareto, f"/v1/jobs/{_part(job_id)}/pareto")

    def memory_curve(self, job_id: str) -> views.MemoryCurve:
        """Batch sizes tried by the best configuration so far: memory and speed."""
        return self._get(views.MemoryCurve, f"/v1/jobs/{_part(job_id)}/memory-curve")

    def estimate(
        self,
        job: JobSpec | dict[str, Any],
        memory_gib: float,
        seconds: float = 0.5,
        look: Callable[[views.EstimateView], None] = lambda _: None,
    ) -> Estimate:
        """The memory a job would need, from shapes alone. Polls every `seconds` until a worker has answered.

        `look` is called with every state seen; what it raises ends the wait. Refused when the estimate failed.
        """
        spec = job.model_dump(mode="json") if isinstance(job, JobSpec) else job
        answer = self._call("POST", "/v1/estimates", json={"spec": spec, "memory_gib": memory_gib})
        path = f"/v1/estimates/{self._read(views.EstimateState, answer).id}"
        try:
            while (seen := self._get(views.EstimateView, path)).state in (
                EstimateStatus.queued,
                EstimateStatus.running,
            ):
                look(seen)
                time.sleep(seconds)
        except KeyboardInterrupt:
            self._call("POST", f"{path}/cancel")
            raise
        if seen.result is None:
            raise Refused(_problem("No estimate", seen.error or f"The estimate was {seen.state}.", 422))
        return seen.result

    def workers(self) -> tuple[views.WorkerView, ...]:
        """All workers."""
        return self._get(views.WorkerList, "/v1/workers").items

    def levers(self) -> views.Catalogue:
        """The catalogue, with what each worker offers."""
        return self._get(views.Catalogue, "/v1/levers")

    def wait(
        self,
        job_id: str,
        seconds: float = 2.0,
        look: Callable[[views.JobView], None] = lambda _: None,
        patience: float = 60.0,
    ) -> views.JobView:
        """Poll every `seconds` until the job has ended; `look` is called with every state seen.

        A control plane that does not answer, or is not ready, is asked again for `patience` seconds; then Unreachable
        or Refused is raised, and at once if none has answered yet.
        """
        answered: float | None = None
        while True:
            try:
                job = self.job(job_id)
                look(job)
                if job.status.ended:
                    return job
                answered = time.monotonic()
            except (Unreachable, Refused) as error:
                if _is_lasting(error) or answered is None or time.monotonic() - answered > patience:
                    raise
            time.sleep(seconds)


def _is_lasting(error: Unreachable | Refused) -> bool:
    """Whether a later attempt would be refused, too."""
    return isinstance(error, Refused) and error.problem.status not in PASSING


def _body(job: JobSpec | dict[str, Any] | str, idempotency_key: str | None = None) -> dict[str, Any]:
    """A job as the body of a request, with the headers that go with it."""
    if isinstance(job, JobSpec):
        job = job.model_dump(mode="json")
    headers = {"Content-Type": "application/yaml" if isinstance(job, str) else "application/json"}
    if idempotency_key is not None:
        if not re.fullmatch(IDEMPOTENCY_KEY, idempotency_key):
            sentence = "An idempotency key has 1 to 200 characters of ASCII, without spaces."
            raise Refused(_problem("The idempotency key is not valid", sentence, 422))
        headers["Idempotency-Key"] = idempotency_key
    return {"content": job if isinstance(job, str) else json.dumps(job), "headers": headers}


def _part(text: str, kind: str = "job") -> str:
    """The id or name as one part of a path; Refused where it cannot be one.

    A slash cannot be in one, also not quoted: servers and proxies read it as the beginning of the path's next part.
    """
    if text in ("", ".", "..") or "/" in text:
        raise Refused(_problem("Not found", f"There is no {kind} {text!r}.", 404))
    return quote(text, safe="")


def _problem(title: str, detail: str, status: int) -> views.Problem:
    return views.Problem(type="about:blank", title=title, status=status, code="unknown", detail=detail)
