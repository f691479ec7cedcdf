"""/v1/trials: one trial with its output. A job's trials are listed by the job."""

from __future__ import annotations

from fastapi import APIRouter

from service import jobs
from service.api.context import Reading
from service.api.problems import responses
from service.contract.views import LoggedTrial
from service.errors import NotFound

router = APIRouter(tags=["trials"])


@router.get("/v1/trials/{trial_id}", responses=responses(NotFound), summary="One trial")
def trial(trial_id: str, session: Reading) -> LoggedTrial:
    """One trial's measurement, with the end of what it printed."""
    return jobs.trial(session, trial_id)
