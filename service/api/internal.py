"""/internal/v1: the queue for workers that reach the control plane only, and not its database.

The routes are the calls of `service.broker.Broker`, one by one, and are not part of the public description: a worker
must be of the control plane's own version.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Header, Request
from fastapi.responses import FileResponse
from pydantic import ValidationError

from service import logs, uploads
from service.api.access import WORKS
from service.api.context import InContext
from service.contract.base import Contract
from service.contract.internal import (
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
from service.contract.task import PlanInput
from service.errors import MalformedBody, OtherVersion

log = logs.logger("dynotune.internal")
Said = TypeVar("Said", bound=Contract)


def same_version(theirs: Annotated[str | None, Header(alias=VERSION)] = None) -> None:
    """OtherVersion unless the worker is of this version, since the two could misunderstand each other."""
    if theirs != (ours := spoken_version()):
        _tell_of(str(theirs)[:100])
        raise OtherVersion(
            f"This control plane is dynotune {ours}, the worker is {theirs or 'unknown'}; install one commit on both."
        )


@functools.lru_cache(maxsize=100)
def _tell_of(theirs: str) -> None:
    """Say once of each version that its workers are refused: for users, no worker is connected."""
    log.warning("a worker of another version is refused", ours=spoken_version(), theirs=theirs)


@functools.cache
def sent(kind: type[Said]) -> Callable[[Request], Awaitable[Said]]:
    """A dependency that reads the body: after the key was checked, so that nobody else's is read."""

    async def read(request: Request) -> Said:
        try:
            return kind.model_validate_json(await request.body())
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise MalformedBody(f"The body is no {kind.__name__}: {place} {first['msg']}.") from error

    return read


router = APIRouter(
    prefix=PATH, tags=["internal"], dependencies=[Depends(same_version), *WORKS], include_in_schema=False
)


@router.put("/workers/{worker_id}", status_code=204)
def register(worker_id: str, asked: Annotated[Registration, Depends(sent(Registration))], here: InContext) -> None:
    """Announce a worker."""
    here.queue.register(worker_id, asked.pid, asked.facts)


@router.delete("/workers/{worker_id}", status_code=204)
def leave(worker_id: str, here: InContext) -> None:
    """Forget a worker that has ended in order."""
    here.queue.leave(worker_id)


@router.post("/claim")
def claim(asked: Annotated[ClaimRequest, Depends(sent(ClaimRequest))], here: InContext) -> ClaimAnswer:
    """Lease a task. What the worker was given before, but never heard of, is handed on at once."""
    if asked.unanswered:
        here.queue.unheard(asked.worker_id)
    return ClaimAnswer(claim=here.queue.claim(asked.worker_id, asked.kinds))


@router.post("/renew")
def renew(asked: Annotated[Renewal, Depends(sent(Renewal))], here: InContext) -> RenewalAnswer:
    """Extend a lease."""
    return RenewalAnswer(wish=here.queue.renew(asked.claim, asked.progress, asked.log))


@router.post("/plan-input")
def plan_input(asked: Annotated[PlanAsked, Depends(sent(PlanAsked))], here: InContext) -> PlanInput:
    """What the claimed plan may know."""
    return here.queue.plan_input(asked.claim)


@router.post("/plan", status_code=204)
def finish_plan(asked: Annotated[Planned, Depends(sent(Planned))], here: InContext) -> None:
    """Carry out a plan's decision."""
    here.queue.finish_plan(asked.claim, asked.decision)


@router.post("/trial", status_code=204)
def finish_trial(asked: Annotated[TrialDone, Depends(sent(TrialDone))], here: InContext) -> None:
    """Record a trial."""
    here.queue.finish_trial(asked.claim, asked.measurement, asked.log)


@router.post("/verify", status_code=204)
def finish_verify(asked: Annotated[VerifyDone, Depends(sent(VerifyDone))], here: InContext) -> None:
    """Record a verification."""
    here.queue.finish_verify(asked.claim, asked.verification, asked.log)


@router.post("/estimate", status_code=204)
def finish_estimate(asked: Annotated[EstimateDone, Depends(sent(EstimateDone))], here: InContext) -> None:
    """Record an estimate."""
    here.queue.finish_estimate(asked.claim, asked.estimate)


@router.get("/uploads/{name}")
def fetch(name: str, here: InContext) -> FileResponse:
    """Data that a user sent."""
    return FileResponse(uploads.find(here.settings.uploads, name))


@router.post("/release", status_code=204)
def release(asked: Annotated[TaskReleased, Depends(sent(TaskReleased))], here: InContext) -> None:
    """Hand a task back unfinished."""
    here.queue.release(asked.claim)


@router.post("/fail", status_code=204)
def fail(asked: Annotated[TaskFailed, Depends(sent(TaskFailed))], here: InContext) -> None:
    """Fail a task and its job."""
    here.queue.fail(asked.claim, asked.reason, asked.log)
