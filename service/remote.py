"""The broker over HTTP: for workers that reach the control plane, but not its database."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import ValidationError

from service import uploads
from service.contract.base import Contract
from service.contract.estimate import Estimate
from service.contract.hardware import HardwareFacts
from service.contract.internal import (
    MOST_WORKER_BODY_BYTES,
    PATH,
    VERSION,
    ClaimAnswer,
    ClaimRequest,
    EstimateDone,
    PlanAsked,
    Planned,
    Registration,
    Renewal,
    RenewalAnswer,
    TaskFailed,
    TaskReleased,
    TrialDone,
    VerifyDone,
    spoken_version,
)
from service.contract.measurement import Measurement, Verification
from service.contract.paths import UPLOAD, UPLOADED
from service.contract.task import (
    Claim,
    EstimateClaim,
    PlanClaim,
    PlanDecision,
    PlanInput,
    TaskKind,
    TrialClaim,
    VerifyClaim,
    Wish,
)
from service.contract.views import Problem
from service.errors import (
    BodyTooLarge,
    BrokerUnavailable,
    Drained,
    Forbidden,
    LeaseLost,
    Misconfigured,
    NotFound,
    OtherVersion,
    Refusal,
    Unauthorized,
)
from service.uploads import COPIES

TIMEOUT_SECONDS = 20.0  # less than a lease, so that a lost answer does not lose the task
Answer = TypeVar("Answer", bound=Contract)
AGAIN = (408, 429)  # statuses that a later attempt may not get
REFUSALS = {Unauthorized.code, Forbidden.code}  # which asking again does not change


class RemoteBroker:
    """`service.broker.Broker` of a control plane at a URL. Misconfigured where its API key is not good for workers."""

    def __init__(self, url: str, key: str | None, http: httpx.Client | None = None) -> None:
        headers = {VERSION: spoken_version()} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.url = url.rstrip("/")
        try:
            self._http = http or httpx.Client(base_url=self.url, timeout=TIMEOUT_SECONDS)
        except httpx.InvalidURL as error:
            raise Misconfigured(f"--server: {url} is not a URL ({error}).") from error
        self._headers = headers
        self._unanswered = False  # whether the last claim's answer was lost

    def register(self, worker_id: str, pid: int, facts: HardwareFacts) -> None:
        """Announce a worker."""
        self._send("PUT", f"workers/{worker_id}", Registration(pid=pid, facts=facts))

    def leave(self, worker_id: str) -> None:
        """Remove a worker that ends."""
        self._send("DELETE", f"workers/{worker_id}")

    def claim(self, worker_id: str, kinds: tuple[TaskKind, ...]) -> Claim | None:
        """Lease the next task; Drained when the worker was told to end."""
        request = ClaimRequest(worker_id=worker_id, kinds=kinds, unanswered=self._unanswered)
        self._unanswered = True
        answer = self._ask(ClaimAnswer, "claim", request)
        self._unanswered = False
        return answer.claim

    def renew(self, claim: Claim, progress: str | None = None, log: str | None = None) -> Wish | None:
        """Extend the lease; return what the user has asked of the claim's job since, if anything."""
        return self._ask(RenewalAnswer, "renew", Renewal(claim=claim, progress=progress, log=log)).wish

    def plan_input(self, claim: PlanClaim) -> PlanInput:
        """The input of the claimed plan."""
        return self._ask(PlanInput, "plan-input", PlanAsked(claim=claim))

    def finish_plan(self, claim: PlanClaim, decision: PlanDecision) -> None:
        """Carry out a plan's decision."""
        self._send("POST", "plan", Planned(claim=claim, decision=decision))

    def finish_trial(self, claim: TrialClaim, measurement: Measurement, log: str) -> None:
        """Record a trial's measurement."""
        self._send("POST", "trial", TrialDone(claim=claim, measurement=measurement, log=log))

    def finish_verify(self, claim: VerifyClaim, verification: Verification, log: str) -> None:
        """Record a verification."""
        self._send("POST", "verify", VerifyDone(claim=claim, verification=verification, log=log))

    def finish_estimate(self, claim: EstimateClaim, estimate: Estimate) -> None:
        """Record an estimate."""
        self._send("POST", "estimate", EstimateDone(claim=claim, estimate=estimate))

    def release(self, claim: Claim) -> None:
        """Hand a task back unfinished."""
        self._send("POST", "release", TaskReleased(claim=claim))

    def fail(self, claim: Claim, reason: str, log: str = "") -> None:
        """Fail the task, and its job if it has one."""
        self._send("POST", "fail", TaskFailed(claim=claim, reason=reason, log=log))

    def fetch(self, source: str, folder: Path) -> None:
        """Copy data that a user sent from the control plane, unless it is there already; BadUpload if it is damaged.

        Copies that no task has used for a day are deleted.
        """
        name = source.removeprefix(UPLOAD)
        if not UPLOADED.fullmatch(source):
            return
        folder.mkdir(parents=True, exist_ok=True)
        uploads.prune(folder, f"{COPIES}{self.url}", time.time() - uploads.KEPT_SECONDS, lambda: {name})
        if (folder / name).exists():
            with contextlib.suppress(OSError):  # it may be another user's
                os.utime(folder / name)
            return
        try:
            with self._http.stream("GET", f"{PATH}/uploads/{name}", headers=self._headers) as answer:
                if not answer.is_success:
                    answer.read()
                    problem = self._problem(answer)
                    if isinstance(problem, Refusal) and answer.status_code == NotFound.status:
                        return  # the trial will say that the data is not there; a proxy's page is no refusal
                    raise problem
                uploads.store(folder, answer.iter_bytes(), name)
        except httpx.HTTPError as error:
            raise BrokerUnavailable(f"{source} did not arrive from {self.url} ({error})") from error

    def reap(self) -> int:
        """Do nothing: the control plane looks for dead workers itself."""
        return 0

    def _ask(self, kind: type[Answer], path: str, body: Contract) -> Answer:
        answer = self._send("POST", path, body)
        try:
            return kind.model_validate_json(answer.content)
        except ValidationError as error:
            raise BrokerUnavailable(f"what answers at {self.url} is no control plane of this version") from error

    def _send(self, method: str, path: str, body: Contract | None = None) -> httpx.Response:
        headers = self._headers | ({"Content-Type": "application/json"} if body is not None else {})
        content = body.model_dump_json().encode() if body is not None else None
        try:
            answer = self._http.request(method, f"{PATH}/{path}", content=content, headers=headers)
        except httpx.HTTPError as error:
            raise BrokerUnavailable(f"no control plane answers at {self.url} ({error})") from error
        if answer.is_success:
            return answer
        raise self._problem(answer)

    def _problem(self, answer: httpx.Response) -> Exception:
        """What an answer that refuses means for the worker."""
        try:
            problem = Problem.model_validate_json(answer.content)
        except ValidationError:  # a proxy's page
            if answer.status_code == BodyTooLarge.status:  # which asking again does not change
                return Misconfigured(
                    f"A proxy before {self.url} takes no bodies of this size ({answer.status_code}); let it take at "
                    f"least {MOST_WORKER_BODY_BYTES >> 20} MiB from workers."
                )
            return BrokerUnavailable(f"{answer.status_code} from {self.url}")
        for kind in (LeaseLost, Drained, OtherVersion):
            if problem.code == kind.code:
                return kind(problem.detail)
        if problem.code in REFUSALS:
            return Misconfigured(f"{self.url} refuses this worker: {problem.detail}")
        if answer.status_code >= 500 or answer.status_code in AGAIN:
            return BrokerUnavailable(f"{self.url}: {problem.detail}")
        return Refusal(f"The control plane refused what the worker said: {problem.detail}")
