"""Answers a memory estimate in a child: no device and no lock are needed, only torch."""

from __future__ import annotations

from service.contract.estimate import Estimate, EstimateClaim
from worker.runner.measuring import Bench

SECONDS = 110.0  # within the lease
HOST_BYTES = 4 << 30


def answer(bench: Bench, claim: EstimateClaim) -> tuple[Estimate | None, str | None]:
    """(the estimate, None), or (None, the sentence that says why there is none)."""
    request = bench.request(
        claim.request.spec,
        claim.id,
        mode="estimate",
        estimate=claim.request.model_dump(mode="json"),
        known=[one.model_dump(mode="json") for one in claim.known],
        facts=bench.facts.model_dump(mode="json"),
    )
    ending = bench.sandbox.run(request, SECONDS, lambda _: None, lambda: False, cap_bytes=HOST_BYTES)
    if ending.kind == "result":
        return Estimate.model_validate(ending.message["result"]), None
    return None, ending.reason or "the worker could not work it out"
