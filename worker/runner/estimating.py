"""Computes a memory estimate in a child process, which needs torch but neither the device nor its lock."""

from __future__ import annotations

from collections.abc import Callable

from service.contract.child import EndingKind, Result, RunEstimate
from service.contract.estimate import Estimate
from service.contract.task import EstimateClaim
from worker.runner.measuring import Bench, JobFailed

SECONDS = 110.0  # an estimate's time limit
HOST_BYTES = 4 << 30  # the cap on an estimate's host memory


def answer(
    bench: Bench, claim: EstimateClaim, on_progress: Callable[[str], None], ended: Callable[[], bool]
) -> Estimate | None:
    """The estimate, or None when `ended` stopped it. JobFailed, with the reason, when it could not be computed."""
    request = RunEstimate(
        workplace=bench.workplace_of(claim.task_id), request=claim.request, facts=bench.facts, known=claim.known
    )
    on_progress("estimating")
    ending = bench.sandbox.run(request, SECONDS, lambda _: None, ended, cap_bytes=HOST_BYTES)
    if ending.kind is EndingKind.ended:
        return None
    if isinstance(ending.last, Result) and ending.last.estimate is not None:
        return ending.last.estimate
    raise JobFailed(ending.reason, ending.log)
