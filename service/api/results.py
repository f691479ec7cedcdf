"""/v1/jobs/{id}/…: what a job has measured, and its answer."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from service import history, jobs
from service.api.access import READS, Visible
from service.api.context import Reading
from service.api.problems import responses
from service.comparisons import pareto, waterfall
from service.contract.recommendation import Recommendation
from service.contract.views import MemoryCurve, Pareto, TrialList, Waterfall
from service.errors import NotFound, NotYet
from service.memory_curve import memory_curve

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["results"], dependencies=READS)


@router.get("/trials", responses=responses(NotFound), summary="A job's trials")
def trials(
    job: Visible,
    session: Reading,
    after: Annotated[int, Query(ge=0, lt=2**31, description="The `number` of the last trial that is known")] = 0,
    limit: Annotated[int, Query(ge=1, le=200)] = 200,
) -> TrialList:
    """Trials by number, with their outcome, reason and measurement; pass the last `number` on as `after` for more."""
    return TrialList(items=jobs.trials(session, job, after, limit))


@router.get("/memory-curve", responses=responses(NotFound, NotYet), summary="Memory and speed by batch size")
def curve(job: Visible) -> MemoryCurve:
    """Memory and speed of every batch size at which the best configuration so far was probed or timed."""
    return memory_curve(jobs.recommendation(job).evidence.measurement)


@router.get("/waterfall", responses=responses(NotFound, NotYet), summary="What each lever brings")
def shares(job: Visible, session: Reading) -> Waterfall:
    """How the best configuration's speed-up comes about: what the run takes with each lever alone taken back."""
    answer = jobs.recommendation(job)
    known = history.load(session, job.id)
    return waterfall(known.spec, answer.evidence.measurement, answer.evidence.baseline, known.trials, answer.verdicts)


@router.get("/pareto", responses=responses(NotFound), summary="Speed against memory")
def front(job: Visible, session: Reading) -> Pareto:
    """The trials that no other beats in both tokens/s and peak memory, fastest first."""
    return pareto(history.load(session, job.id).trials)


@router.get("/recommendation", responses=responses(NotFound, NotYet), summary="The answer")
def recommendation(job: Visible) -> Recommendation:
    """The fastest stable configuration with its evidence. `final` is false while the job is still searching."""
    return jobs.recommendation(job)
