"""Computes from a job's history its recommendation, or the sentence that says why there is none. Pure, without I/O."""

from __future__ import annotations

from typing import Any, TypeAlias

from service import logs
from service.contract.measurement import Measurement, Outcome
from service.contract.task import Claim, TaskKind, TrialClaim
from service.errors import OTHER_VERSION
from service.history import JobHistory
from service.recommend import recommend

MOST_DEATHS_OF_A_TASK = 3
log = logs.logger("dynotune.conclude")
Stored: TypeAlias = dict[str, Any] | None  # a recommendation as the job's row keeps it
STOPPED = "The job was stopped before it had ended, so this is the best of what had been measured until then."
STOPPED_TOO_EARLY = "The job was stopped before any trial had succeeded, so there is nothing to recommend."
STOPPED_AT_A_DEFECT = (
    "The job was stopped, and its best could not be computed for a defect of dynotune; what it last recommended, if "
    "anything, is still there."
)


class Inconclusive(Exception):
    """A defect of this code keeps a job's recommendation from being computed. Its text is for the job's user."""


class Unreadable(Inconclusive):
    """What the job has measured was written by another version, and cannot be read."""


def best(known: JobHistory, final: bool) -> Stored:
    """The recommendation, or None before the first good trial; Inconclusive where computing it fails."""
    if not known.is_readable:
        raise Unreadable(OTHER_VERSION)
    if known.facts is None:
        return None
    try:
        found = recommend(
            known.job_id, known.spec, known.facts, known.trials, known.verifications, known.notes, final, known.spent
        )
    except Exception as error:
        log.exception("no recommendation could be computed", job=known.job_id)
        text = f"The recommendation could not be computed: {type(error).__name__}: {str(error)[:300]}"
        raise Inconclusive(f"{text}; the log of the service or of the worker says where.") from error
    return found.model_dump(mode="json") if found else None


def last_recommendation_column(known: JobHistory) -> dict[str, Any]:
    """The column to write, with the last recommendation of a job that is stopped, is cancelled or fails.

    Empty where it cannot be computed: the one that is stored then stays, and the job ends all the same.
    """
    try:
        return {"recommendation": best(known, final=True)}
    except Inconclusive:
        return {}


def nothing_stable(known: JobHistory) -> str:
    """Why a job whose trials ran has nothing to recommend."""
    verdicts = [verdict for one in known.verifications.values() if one for verdict in one.verdicts]
    reasons = dict.fromkeys(reason for verdict in verdicts for reason in verdict.reasons)
    return f"No configuration was stable: {'; '.join(reasons)}." if reasons else "No configuration could be verified."


def death(claim: Claim) -> str:
    """Why a task is given up whose workers died again and again."""
    if claim.kind is TaskKind.plan:
        return f"Planning ended {MOST_DEATHS_OF_A_TASK} workers; see their logs."
    return f"{MOST_DEATHS_OF_A_TASK} workers died while running this; it is not tried again."


def crashed(claim: TrialClaim) -> Measurement:
    """The measurement of a trial that is given up."""
    return Measurement(configuration=claim.request.configuration, outcome=Outcome.crashed, reason=death(claim))
