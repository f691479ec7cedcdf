"""What a job's history comes to: its recommendation, and the sentences about a job that has none. Pure."""

from __future__ import annotations

from typing import Any, TypeAlias

from service.contract.measurement import Measurement, Outcome
from service.contract.task import Claim, TaskKind, TrialClaim
from service.history import JobHistory
from service.recommend import recommend

MAX_DEATHS = 3
Stored: TypeAlias = dict[str, Any] | None  # a recommendation as the job's row keeps it
STOPPED = "The job was stopped before its search had ended, so this is the best of the trials until then."
STOPPED_TOO_EARLY = "The job was stopped before any trial had succeeded, so there is nothing to recommend."


def best(known: JobHistory, final: bool) -> Stored:
    """The recommendation, or None before the first good trial."""
    if known.facts is None:
        return None
    found = recommend(
        known.job_id, known.spec, known.facts, known.trials, known.verifications, known.notes, final, known.spent
    )
    return found.model_dump(mode="json") if found else None


def nothing_stable(known: JobHistory) -> str:
    """Why a job whose trials ran has nothing to recommend."""
    verdicts = [verdict for one in known.verifications.values() if one for verdict in one.verdicts]
    reasons = dict.fromkeys(reason for verdict in verdicts for reason in verdict.reasons)
    return "No configuration was stable: " + "; ".join(reasons) + "."


def death(claim: Claim) -> str:
    """Why a task is given up whose workers died again and again."""
    if claim.kind is TaskKind.plan:
        return f"Planning ended {MAX_DEATHS} workers; see their logs."
    return f"{MAX_DEATHS} workers died while running this; it is not tried again."


def crashed(claim: TrialClaim) -> Measurement:
    """The measurement of a trial that is given up."""
    return Measurement(configuration=claim.request.configuration, outcome=Outcome.crashed, reason=death(claim))
