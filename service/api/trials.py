"""/v1/trials: a trial by its id. `/v1/jobs/{id}/trials` lists those of a job."""

from __future__ import annotations

from fastapi import APIRouter

from service import jobs
from service.api.access import READS, Called
from service.api.context import Reading
from service.api.problems import responses
from service.contract.views import LoggedTrial
from service.errors import NotFound

router = APIRouter(tags=["trials"])


@router.get("/v1/trials/{trial_id}", responses=responses(NotFound), dependencies=READS, summary="One trial")
def trial(trial_id: str, session: Reading, who: Called) -> LoggedTrial:
    """A trial with its measurement and the end of what its process printed."""
    return jobs.trial(session, trial_id, who.sees)
