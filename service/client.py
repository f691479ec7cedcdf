"""A small typed client of the API.

with Client("http://127.0.0.1:8000") as client:
    job = client.submit({"model": {...}, "dataset": {...}})
    client.wait(job)
    print(client.recommendation(job).configuration)
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import httpx

from service.contract.estimate import Estimate
from service.contract.job import JobSpec
from service.contract.recommendation import Recommendation

ENDED = ("succeeded", "failed", "cancelled")


class Unreachable(Exception):
    """The control plane does not answer."""


class Refused(Exception):
    """The control plane answered with a problem; `problem` is its body, `code` its stable name."""

    def __init__(self, problem: dict[str, Any]) -> None:
        super().__init__(problem.get("detail") or problem.get("title") or "refused")
        self.problem = problem
        self.code = str(problem.get("code", "unknown"))


class Client:
    """Speaks to one control plane. Raises Unreachable or Refused."""

    def __init__(self, url: str = "http://127.0.0.1:8000", timeout: float = 30.0) -> None:
        self.url = url.rstrip("/")
        try:
            self._http = httpx.Client(base_url=self.url, timeout=timeout)
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
        try:
            answer = self._http.request(method, path, **options)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unreachable(f"no control plane answers at {self.url} ({error})") from error
        if answer.is_success:
            return answer
        try:
            problem = dict(answer.json())
        except (ValueError, TypeError):
            problem = {"title": answer.reason_phrase, "detail": f"{answer.status_code} from {self.url}{path}"}
        raise Refused(problem)

    def _json(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            return dict(answer.json())
        except (ValueError, TypeError) as error:
            raise Unreachable(f"what answers at {self.url} is not a dynotune control plane") from error

    def _get(self, path: str, **parameters: Any) -> dict[str, Any]:
        given = {name: value for name, value in parameters.items() if value is not None}
        return self._json(self._call("GET", path, params=given))

    def submit(self, job: JobSpec | dict[str, Any] | str) -> str:
        """Submit a job given as a JobSpec, a dictionary, or YAML text; its id."""
        if isinstance(job, JobSpec):
            job = job.model_dump(mode="json")
        body = job if isinstance(job, str) else json.dumps(job)
        kind = "application/yaml" if isinstance(job, str) else "application/json"
        answer = self._call("POST", "/v1/jobs", content=body, headers={"Content-Type": kind})
        return str(self._json(answer)["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        """Status, phase, progress, best so far."""
        return self._get(f"/v1/jobs/{job_id}")

    def jobs(self, status: str | None = None, label: str | None = None) -> Iterator[dict[str, Any]]:
        """All jobs, newest first, page by page."""
        cursor: str | None = None
        while True:
            page = self._get("/v1/jobs", status=status, label=label, cursor=cursor)
            yield from page["items"]
            cursor = page["next"]
            if cursor is None:
                return

    def trials(self, job_id: str) -> list[dict[str, Any]]:
        """A job's trials."""
        return list(self._get(f"/v1/jobs/{job_id}/trials")["items"])

    def trial(self, trial_id: str) -> dict[str, Any]:
        """One trial with its log."""
        return self._get(f"/v1/trials/{trial_id}")

    def events(self, job_id: str, after: int = 0) -> list[dict[str, Any]]:
        """A job's events after a sequence number."""
        return list(self._get(f"/v1/jobs/{job_id}/events", after=after)["items"])

    def recommendation(self, job_id: str) -> Recommendation:
        """The answer, or the best so far (`final` says which)."""
        return Recommendation.model_validate(self._get(f"/v1/jobs/{job_id}/recommendation"))

    def export(self, job_id: str, name: str) -> str:
        """The recommendation as text: json, spec or train.py."""
        return self._call("GET", f"/v1/jobs/{job_id}/exports/{name}").text

    def cancel(self, job_id: str) -> None:
        """End a job now."""
        self._call("POST", f"/v1/jobs/{job_id}/cancel")

    def stop(self, job_id: str) -> None:
        """End a job now with the best so far."""
        self._call("POST", f"/v1/jobs/{job_id}/stop")

    def memory_curve(self, job_id: str) -> dict[str, Any]:
        """Batch sizes tried by the best configuration so far: memory and speed."""
        return self._get(f"/v1/jobs/{job_id}/memory-curve")

    def estimate(self, job: JobSpec | dict[str, Any], memory_gib: float, seconds: float = 0.5) -> Estimate:
        """The memory a job would need, from shapes alone; waits for a worker's answer. Refused when there is none."""
        spec = job.model_dump(mode="json") if isinstance(job, JobSpec) else job
        answer = self._call("POST", "/v1/estimates", json={"spec": spec, "memory_gib": memory_gib})
        path = f"/v1/estimates/{self._json(answer)['id']}"
        while (found := self._get(path))["state"] in ("queued", "running"):
            time.sleep(seconds)
        if found["state"] == "failed":
            raise Refused({"title": "No estimate", "detail": found["error"], "status": 422})
        return Estimate.model_validate(found["result"])

    def workers(self) -> list[dict[str, Any]]:
        """All workers."""
        return list(self._get("/v1/workers")["items"])

    def levers(self) -> dict[str, Any]:
        """The catalogue, with what each worker offers."""
        return self._get("/v1/levers")

    def wait(
        self, job_id: str, seconds: float = 2.0, look: Callable[[dict[str, Any]], None] = lambda _: None
    ) -> dict[str, Any]:
        """Poll until the job has ended; `look` is given every state seen."""
        while True:
            job = self.job(job_id)
            look(job)
            if job["status"] in ENDED:
                return job
            time.sleep(seconds)
