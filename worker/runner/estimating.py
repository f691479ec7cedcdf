"""Answers a memory estimate in a child, which needs torch but neither the device nor its lock."""

from __future__ import annotations

from service.contract.child import Result, RunEstimate
from service.contract.estimate import Estimate, EstimateClaim
from worker.runner.measuring import Bench

SECONDS = 110.0  # within the lease
HOST_BYTES = 4 << 30


def answer(bench: Bench, claim: EstimateClaim) -> tuple[Estimate | None, str | None]:
    """(the estimate, None), or (None, the sentence that says why there is none)."""
    request = RunEstimate(
        workplace=bench.workplace_of(claim.id), request=claim.request, facts=bench.facts, known=claim.known
    )
    ending = bench.sandbox.run(request, SECONDS, lambda _: None, lambda: False, cap_bytes=HOST_BYTES)
    if isinstance(ending.last, Result):
        return ending.last.estimate, None
    return None, ending.reason
