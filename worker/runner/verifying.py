"""Runs a verification: finalists and baseline take turns in blocks under other seeds, then the fastest is soaked."""

from __future__ import annotations

import time
from collections.abc import Callable

from service.contract.child import EndingKind, Failed, Result, RunBlock, RunSoak
from service.contract.configuration import Configuration
from service.contract.job import JobSpec
from service.contract.measurement import Block, Measurement, Outcome, Soak, Verification
from service.contract.task import VerifyRequest
from service.levers.optimizer import WHOLE_STEP
from worker.runner.measuring import Bench, JobFailed, outcome_of
from worker.runner.sandbox import Ending

SOAK_SHARE = 0.25  # of the verification's time, kept for the soak


class _Ended(Exception):
    """The verification must end, because its job was cancelled or stopped, or its lease lost."""


class Verifier:
    """One verification, with the blocks and soaks that have run so far."""

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
        self._bench, self._spec, self._request = bench, spec, request
        self._workplace = bench.workplace_of(job_id)
        self._progress, self._ended, self._lock_fd = on_progress, ended, lock_fd
        self._started = time.monotonic()
        self._quick = spec.search.verify == "quick"
        self._blocks: list[Block] = []
        self._soaks: dict[str, Soak | str] = {}
        self._numbers = 0
        self._unsafe = False
        self.log = ""

    def run(self) -> Verification | None:
        """Run the blocks and soaks; the verification, or None when `ended` stopped it."""
        try:
            self._run_blocks()
            self._soak_fastest()
            for reserve in self._request.reserves:
                if self._held() or self._left() <= 0:
                    break
                for number in range(0, self._numbers, 2):
                    self._add(reserve, number)
                self._soak_fastest()
        except _Ended:
            return None
        return self._judged().model_copy(update={"seconds": time.monotonic() - self._started})

    def _run_blocks(self) -> None:
        """Run blocks of all candidates until there are enough of them, or the time that is left is the soak's."""
        request = self._request
        candidates = [one for one in (request.baseline, request.reference) if one is not None] + [*request.finalists]
        took: dict[str, float] = {}
        while self._numbers < request.blocks:
            # Every other block runs in reverse order, so that a drift of the machine's pace favours no candidate. A
            # quick verification leaves the slow baseline out of these, since they are there to order the finalists.
            backwards = list(request.finalists[::-1]) if self._quick else candidates[::-1]
            block = candidates if self._numbers % 2 == 0 else backwards
            expected = sum(took[candidate.configuration.key] for candidate in block) if took else 0.0
            if took and self._left() - expected < request.seconds_limit * SOAK_SHARE:
                break
            for candidate in block:
                began = time.monotonic()
                self._add(candidate, self._numbers)
                took[candidate.configuration.key] = time.monotonic() - began
            self._numbers += 1

    def _add(self, candidate: Measurement, number: int) -> None:
        """Run a candidate's block, unless the candidate has failed in a block before."""
        key = candidate.configuration.key
        if all(block.outcome is Outcome.ok for block in self._blocks if block.key == key):
            self._blocks.append(self._block(candidate, number))

    def _soak_fastest(self) -> None:
        """Soak the candidates, fastest first, until a soak succeeds.

        A candidate whose soak ran out of memory, or came close to that, is soaked again at a smaller micro batch.
        """
        request = self._request
        known = {one.configuration.key: one for one in (*request.finalists, *request.reserves)}
        known |= {request.baseline.configuration.key: request.baseline} if request.baseline else {}
        while ranking := self._judged().ranking:
            key = ranking[0]
            if isinstance(self._soaks.get(key), Soak):
                return
            self._soaks[key] = self._soak(known[key])
            if self._unsafe and (lower := lowered(known[key])):
                again = self._soak(lower)
                if isinstance(again, Soak):
                    self._soaks[key] = again
                    self._time_again(lower)

    def _time_again(self, lower: Measurement) -> None:
        """Replace a candidate's blocks, which ran at a micro batch that failed the soak, by blocks at the lower one."""
        key = lower.configuration.key
        self._blocks = [block for block in self._blocks if block.key != key]
        for number in range(0, self._numbers, 2):
            self._add(lower, number)

    def _judged(self) -> Verification:
        from worker.plan.verdicts import judge  # imported here because worker.plan imports Optuna, which takes a second

        return judge(self._spec, self._request, tuple(self._blocks), self._soaks)

    def _held(self) -> bool:
        """Whether a candidate other than the baseline is stable."""
        judged = self._judged()
        return any(key != judged.baseline_key for key in judged.ranking)

    def _left(self) -> float:
        return self._request.seconds_limit - (time.monotonic() - self._started)

    def _block(self, candidate: Measurement, number: int) -> Block:
        key = candidate.configuration.key
        seed = self._spec.training.seed + 1 + number
        self._progress(f"block {number + 1}: {candidate.configuration.title(self._against())}")
        ending = self._run(
            RunBlock(workplace=self._workplace, spec=self._spec, candidate=candidate, block=number, seed=seed)
        )
        if isinstance(ending.last, Result) and ending.last.block is not None:
            return ending.last.block
        outcome, reason = _failure(ending)
        return Block(key=key, block=number, seed=seed, outcome=outcome, reason=reason)

    def _soak(self, candidate: Measurement) -> Soak | str:
        """The soak's result, or a sentence that says why it failed."""
        self._progress(f"soak of {candidate.micro_batch_size}: {candidate.configuration.title(self._against())}")
        seconds = max(5.0, min(self._left(), self._request.seconds_limit * SOAK_SHARE))
        seed = self._spec.training.seed + 101
        ending = self._run(
            RunSoak(workplace=self._workplace, spec=self._spec, candidate=candidate, seed=seed, seconds=seconds)
        )
        unsafe = isinstance(ending.last, Failed) and ending.last.unsafe
        self._unsafe = ending.kind is EndingKind.out_of_memory or unsafe
        if isinstance(ending.last, Result) and ending.last.soak is not None:
            return ending.last.soak
        outcome, reason = _failure(ending)
        return f"the soak failed ({outcome}): {reason}"

    def _against(self) -> Configuration | None:
        return self._request.baseline.configuration if self._request.baseline else None

    def _run(self, request: RunBlock | RunSoak) -> Ending:
        # A block does once what its trial did several times, so a process that takes four times the trial's time hangs.
        limit = 120.0 + 4 * sum(request.candidate.time_spent.values()) + self._request.seconds_limit * SOAK_SHARE
        ending = self._bench.sandbox.run(
            request, limit, lambda _: None, self._ended, self._lock_fd, self._bench.host_cap(self._spec)
        )
        self.log += ending.log
        if ending.kind is EndingKind.ended:
            raise _Ended
        if isinstance(ending.last, Failed) and ending.last.whole_job:
            raise JobFailed(ending.reason, self.log)
        return ending


def lowered(candidate: Measurement) -> Measurement | None:
    """The candidate with the next smaller micro batch that its curve or its effective batch offers, or None."""
    micro, effective = candidate.micro_batch_size or 1, candidate.configuration.effective_batch_size
    smaller = [size for size in range(1, micro) if effective % size == 0 or micro % size == 0]
    if not smaller or candidate.configuration.levers["optimizer"] in WHOLE_STEP:
        return None
    steps = -(-(candidate.gradient_accumulation_steps or 1) * micro // smaller[-1])
    return candidate.model_copy(update={"micro_batch_size": smaller[-1], "gradient_accumulation_steps": steps})


def _failure(ending: Ending) -> tuple[Outcome, str]:
    if ending.kind is EndingKind.out_of_memory:
        return Outcome.infeasible, f"memory ran out at a batch that had fitted: {ending.reason}"
    return outcome_of(ending), ending.reason
