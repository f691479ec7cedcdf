"""Runs a verification: finalists and baseline in interleaved blocks with other seeds, then a soak of the fastest."""

from __future__ import annotations

import time
from collections.abc import Callable

from service.contract.configuration import Configuration
from service.contract.job import JobSpec
from service.contract.measurement import Block, Measurement, Outcome, Soak, Verification
from service.contract.task import VerifyRequest
from worker.measuring import Bench, JobFailed
from worker.plan.verdicts import judge
from worker.sandbox import Ending

SOAK_SHARE = 0.25


class Verifier:
    """One verification under way."""

    def __init__(
        self,
        bench: Bench,
        spec: JobSpec,
        job_id: str,
        request: VerifyRequest,
        on_progress: Callable[[str], None],
        ended: Callable[[], bool],
        lock_fd: int | None,
    ) -> None:
        self._bench, self._spec, self._job_id, self._request = bench, spec, job_id, request
        self._progress, self._ended, self._lock_fd = on_progress, ended, lock_fd
        self._started = time.monotonic()
        self._quick = spec.search.verify == "quick"
        self.log = ""

    def run(self) -> Verification | None:
        """The verification, or None when it was ended from outside."""
        request = self._request
        baseline = request.baseline
        candidates = [*([baseline] if baseline else []), *request.finalists]
        blocks: list[Block] = []
        longest = 0.0
        number = 0
        while number < request.blocks:
            began = time.monotonic()
            if number and self._left() - longest < request.seconds_limit * SOAK_SHARE:
                break
            # Every other block runs backwards, so that a drift of the machine favours nobody. A quick one leaves the
            # slow baseline out of those: the order of the finalists is what more blocks are for.
            backwards = list(request.finalists[::-1]) if self._quick else candidates[::-1]
            for candidate in candidates if number % 2 == 0 else backwards:
                if any(
                    block.key == candidate.configuration.key and block.outcome is not Outcome.ok for block in blocks
                ):
                    continue
                block = self._block(candidate, number)
                if block is None:
                    return None
                blocks.append(block)
            longest = max(longest, time.monotonic() - began)
            number += 1
        verification = judge(self._spec, request, tuple(blocks), {})
        soaks: dict[str, Soak | str] = {}
        for key in verification.ranking:
            candidate = next(one for one in candidates if one.configuration.key == key)
            soak = self._soak(candidate)
            if soak is None:
                return None
            soaks[key] = soak
            if isinstance(soak, Soak):
                break
        seconds = time.monotonic() - self._started
        return judge(self._spec, request, tuple(blocks), soaks).model_copy(update={"seconds": seconds})

    def _left(self) -> float:
        return self._request.seconds_limit - (time.monotonic() - self._started)

    def _block(self, candidate: Measurement, number: int) -> Block | None:
        key = candidate.configuration.key
        seed = self._spec.training.seed + 1 + number
        self._progress(f"block {number + 1}: {candidate.configuration.title(self._against())}")
        ending = self._run("block", candidate, block=number, seed=seed)
        if ending.kind == "ended":
            return None
        if ending.kind == "result":
            return Block.model_validate(ending.message["result"])
        outcome, reason = _failure(ending)
        return Block(key=key, block=number, seed=seed, outcome=outcome, reason=reason)

    def _soak(self, candidate: Measurement) -> Soak | str | None:
        """The soak, or the sentence that says how it failed; None when it was ended from outside."""
        self._progress(f"soak: {candidate.configuration.title(self._against())}")
        seconds = max(5.0, min(self._left(), self._request.seconds_limit * SOAK_SHARE))
        ending = self._run("soak", candidate, seed=self._spec.training.seed + 101, seconds=seconds)
        if ending.kind == "ended":
            return None
        if ending.kind == "result":
            return Soak.model_validate(ending.message["result"])
        outcome, reason = _failure(ending)
        return f"the soak failed ({outcome}): {reason}"

    def _against(self) -> Configuration | None:
        return self._request.baseline.configuration if self._request.baseline else None

    def _run(self, mode: str, candidate: Measurement, **more: object) -> Ending:
        request = self._bench.request(
            self._spec, self._job_id, mode=mode, candidate=candidate.model_dump(mode="json"), **more
        )
        # A block does once what the trial did more than once, so a few times the trial is a hang.
        limit = 120.0 + 4 * sum(candidate.time_spent.values()) + self._request.seconds_limit * SOAK_SHARE
        ending = self._bench.sandbox.run(request, limit, lambda _: None, self._ended, self._lock_fd)
        self.log += ending.log
        if ending.message.get("whole_job"):
            raise JobFailed(ending.reason)
        return ending


def _failure(ending: Ending) -> tuple[Outcome, str]:
    if ending.kind == "out_of_memory":
        return Outcome.infeasible, f"memory ran out at a batch that had fitted: {ending.reason}"
    if ending.kind == "timed_out":
        return Outcome.timed_out, ending.reason
    if ending.kind == "failed":
        return Outcome(ending.message["outcome"]), ending.reason
    return Outcome.crashed, ending.reason
