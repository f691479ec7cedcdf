"""Runs a verification: finalists and baseline take turns in blocks, then the fastest is proved and soaked.

Last, unless the verification is quick, the fastest takes turns with what it is without each of its levers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from service.contract.child import ChildFailed, EndingKind, Result, RunBlock, RunReplay, RunSoak
from service.contract.configuration import Configuration
from service.contract.job import JobSpec
from service.contract.measurement import Block, Measurement, Outcome, Soak, Verification
from service.contract.replay import Proof
from service.contract.task import EVALUATED, LEAST_BLOCKS, LEAST_SOAK_SECONDS, MOST_LOG, VerifyRequest, keeps_process
from service.levers import taken_back
from service.levers.optimizer import WHOLE_STEP
from worker.runner.kept import Keeper
from worker.runner.measuring import Bench, JobFailed
from worker.runner.proving import Prover, failure
from worker.runner.sandbox import Ending
from worker.runner.together import fit_together, groups

SOAK_SHARE, HOLD_SHARE = 0.25, 0.5  # of the verification's time: a soak's, at most; kept for the proof and the soak
REFERENCE_TIMES = 10.0  # times as long as the candidate itself a reference may take: in fp32, with one sample a row


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
        self._progress = on_progress
        self._children = Keeper(bench.sandbox, ended, lock_fd, bench.host_cap(spec))
        self._started, self._quick = time.monotonic(), spec.search.verify == "quick"
        self._blocks: list[Block] = []
        self._soaks: dict[str, Soak | str] = {}
        self._proofs: dict[str, Proof | str] = {}
        self._prover = Prover(spec, bench.facts, self._workplace, on_progress, self._run)
        self._numbers = 0
        # Whether memory was short in the last soak; candidates may be alive together; the baseline sat out a block.
        self._unsafe, self._may_be_together, self._rested = False, True, False
        self._halfway: list[Measurement] = []  # who still has to run in reverse order
        self._lowered: dict[str, Measurement] = {}  # those that the soak gave a smaller micro batch
        self._due: set[str] = set()  # the keys of those whose next block runs whatever time is left
        self._tentative: set[str] = set()  # the keys of those without a lever, which only tell what it brings
        self.log = ""

    def run(self) -> Verification | None:
        """Run the blocks and soaks; the verification, or None when `ended` stopped it."""
        try:
            self.run_blocks()
            self._hold_fastest()
            for reserve in self._request.reserves:
                if self._held() or self._left() <= 0:
                    break
                self._run_beside_another(reserve)
                self._hold_fastest()
            self._take_levers_back()
        except _Ended:
            return None
        finally:
            self._children.close()
        return self.judged().model_copy(update={"seconds": time.monotonic() - self._started})

    def run_blocks(self) -> None:
        """Run blocks until the order and the speed-up are settled, or the time that is left is the soak's.

        A block of candidates that ran one after another is followed by one of the same in reverse order, while there is
        time at all.
        """
        request, took = self._request, 0.0
        while (self._halfway or self._numbers < request.blocks) and not self._is_over(took):
            began = time.monotonic()
            self._run_block(self._halfway or self._candidates())
            took = time.monotonic() - began
            self._numbers += 1
        self._children.close()

    def _is_over(self, took: float) -> bool:
        """Whether no more blocks are to be begun, of which the last one took so many seconds."""
        from worker.plan.ratios import settled

        is_free = self._numbers >= LEAST_BLOCKS and not self._halfway  # to end here
        kept = self._request.seconds_limit * HOLD_SHARE if is_free else 0.0
        if self._numbers and self._left() - took < kept:
            return True
        return is_free and settled(self._spec, self._request, tuple(self._blocks))

    def _candidates(self) -> list[Measurement]:
        """Those of the next block: finalists that are not certainly slower than another, and the baseline."""
        from worker.plan.ratios import certainly_slower

        request = self._request
        slower = certainly_slower(self._spec, request, tuple(self._blocks)) if self._numbers else set()
        finalists = [one for one in request.finalists if one.configuration.key not in slower]
        baseline = [] if request.baseline is None or self._baseline_rests(finalists) else [request.baseline]
        return [*baseline, *finalists]

    def _take_levers_back(self) -> None:
        """Let the fastest take turns with what it is without each of its levers, as long as there is time for it.

        That tells what each lever brings more surely than trials that are minutes apart. One that brings nothing is
        left out of the answer, once the simpler configuration is proved and soaked itself.
        """
        from worker.plan.budget import verification_seconds

        request, first = self._request, self._first()
        if request.baseline is None or first is None or first is request.baseline:
            return
        made = taken_back(self._spec, first.configuration, request.baseline.configuration)
        keys, ran = {one.key for one in made.values()}, {block.key for block in self._blocks}
        others = [one for one in request.taken_back if one.configuration.key in keys - ran]
        self._tentative = {one.configuration.key for one in others}
        with contextlib.suppress(_Ended):  # what is proved and soaked already stays the answer
            for group in groups(first, others, self._bench.facts):
                # Two blocks, and for one that turns out to be as fast a proof and a soak.
                if self._left() < verification_seconds(self._spec, self._bench.facts, [*group, first]):
                    break
                self._halfway = []
                for _ in range(LEAST_BLOCKS):
                    self._run_block(self._halfway or [first, *group])
                    self._numbers += 1
            self._hold_fastest()

    def _first(self) -> Measurement | None:
        """The first of the ranking so far, at the micro batch that it was soaked at; None where none is stable."""
        ranking = self.judged().ranking
        return {**self._known(), **self._lowered}[ranking[0]] if ranking else None

    def _known(self) -> dict[str, Measurement]:
        """All that may run, by their keys."""
        request = self._request
        every = (*request.finalists, *request.reserves, *request.taken_back, request.baseline)
        return {one.configuration.key: one for one in every if one is not None}

    def _baseline_rests(self, finalists: list[Measurement]) -> bool:
        """Whether the slow baseline is left out of this block: every other time in a quick verification.

        Such a block is to order finalists whose speed-ups are known already.
        """
        from worker.plan.ratios import by_blocks, is_sure

        blocks, baseline = tuple(self._blocks), self._request.baseline
        if not self._quick or not blocks or len(finalists) == 1 or baseline is None or self._rested:
            self._rested = False
            return False
        self._rested = all(is_sure(by_blocks(self._spec, blocks, one, baseline)) for one in finalists)
        return self._rested

    def _run_block(self, candidates: list[Measurement]) -> None:
        """Run one block of the candidates that have not failed: together and in turns where their memory allows that.

        Otherwise they run one after another. The next block then has the same candidates in reverse order, so that a
        drift of the machine's pace favours none of them.
        """
        running = [one for one in candidates if self._runs(one)]
        together = self._may_be_together and not self._halfway and len(running) > 1
        if together and fit_together(running, self._bench.facts):
            blocks = self._together(running)
            if all(block.outcome is not Outcome.infeasible for block in blocks):
                self._blocks += blocks
                return
            self._may_be_together = False  # one of them ran out of memory, which it may not do alone
        ran = []
        for candidate in running:
            if self._has_time_for(candidate):
                self._add(candidate, self._numbers)
                ran.append(candidate)
        self._halfway = [] if self._halfway else ran[::-1]

    def _has_time_for(self, candidate: Measurement) -> bool:
        """Whether a candidate's block fits into the time; any does until one has run that may be the answer."""
        from worker.plan.budget import block_seconds

        finalists = {one.configuration.key for one in self._request.finalists}
        if finalists.isdisjoint(block.key for block in self._blocks) or candidate.configuration.key in self._due:
            return True
        return self._left() >= block_seconds(self._spec, self._bench.facts, candidate)

    def _runs(self, candidate: Measurement) -> bool:
        """Whether a candidate has not failed in a block."""
        key = candidate.configuration.key
        return all(block.outcome is Outcome.ok for block in self._blocks if block.key == key)

    def _add(self, candidate: Measurement, number: int) -> None:
        """Run a candidate's block alone, unless the candidate has failed in a block before."""
        if self._runs(candidate):
            self._blocks.append(self._block(candidate, number))

    def _together(self, candidates: list[Measurement]) -> list[Block]:
        """One block of candidates that are alive at the same time."""
        titles = ", ".join(one.configuration.title(self._against()) for one in candidates)
        self._progress(f"block {self._numbers + 1}, in turns: {titles}")
        asked = [self._asked(one, self._numbers).model_copy(update={"in_turns": True}) for one in candidates]
        endings = self._children.together(asked, [self._limit(one) for one in candidates])
        for ending in endings:
            self._check(ending)
        return [_block_of(request, ending) for request, ending in zip(asked, endings, strict=True)]

    def _hold_fastest(self) -> None:
        """Prove and soak the candidates, fastest first, until one of them passes both.

        A candidate whose soak ran out of memory, or came close to that, is soaked again at a smaller micro batch. The
        baseline is what the others are compared with, so it is only soaked.
        """
        request, known = self._request, self._known()
        while ranking := self._judged(frozenset()).ranking:
            key = ranking[0]
            if isinstance(self._soaks.get(key), Soak):
                return
            is_baseline = request.baseline is not None and key == request.baseline.configuration.key
            if not is_baseline and key not in self._proofs:
                self._proofs[key] = self._prover.proof(known[key])
                continue
            self._soaks[key] = self._soak(known[key])
            if self._unsafe and (lower := lowered(known[key])):
                again = self._soak(lower)
                if isinstance(again, Soak):
                    self._soaks[key], self._lowered[key] = again, lower
                    self._time_again(lower)

    def _time_again(self, lower: Measurement) -> None:
        """Replace a candidate's blocks, which ran at a micro batch that failed the soak, by blocks at the lower one."""
        self._blocks = [block for block in self._blocks if block.key != lower.configuration.key]
        self._run_beside_another(lower)

    def _run_beside_another(self, candidate: Measurement) -> None:
        """Run blocks of a candidate that has none yet, beside the baseline; where there is none, beside a finalist.

        Blocks that ran before are minutes old by now, and the machine's pace may be another. The first of the new ones
        runs whatever time is left, or a candidate that was proved and soaked could not be the answer for want of it.
        """
        known = {**self._known(), **self._lowered}
        every = (self._request.baseline, *self._request.finalists)
        others = [known[one.configuration.key] for one in every if one and one.configuration != candidate.configuration]
        ran = {block.key for block in self._blocks}
        beside = [one for one in others if one.configuration.key in ran and self._runs(one)][:1]
        self._due = {one.configuration.key for one in (*beside, candidate)}
        self._halfway = []
        for number in range(LEAST_BLOCKS):
            if number and self._left() <= 0:
                break
            self._run_block(self._halfway or [*beside, candidate])
            self._numbers += 1
            self._due = set()
        self._halfway = []

    def judged(self) -> Verification:
        """The verification by the blocks, proofs and soaks that have run so far.

        Once some candidate is proved and soaked, only such a candidate may be first in the ranking.
        """
        held = {key for key, soak in self._soaks.items() if isinstance(soak, Soak)}
        found = self._judged(self._tentative - held)
        if held and held.isdisjoint(found.ranking[:1]):
            # Blocks that ran afterwards put another one first, and the job was stopped before that was proved.
            return self._judged({one.key for one in found.verdicts} - held)
        return found

    def _judged(self, unranked: AbstractSet[str]) -> Verification:
        from worker.plan.verdicts import judge  # imported here, as it imports numpy

        return judge(self._spec, self._request, tuple(self._blocks), self._soaks, self._proofs, unranked)

    def _held(self) -> bool:
        """Whether a candidate other than the baseline is stable."""
        judged = self.judged()
        return any(key != judged.baseline_key for key in judged.ranking)

    def _left(self) -> float:
        return self._request.seconds_limit - (time.monotonic() - self._started)

    def _block(self, candidate: Measurement, number: int) -> Block:
        self._progress(f"block {number + 1}: {candidate.configuration.title(self._against())}")
        request = self._asked(candidate, number)
        return _block_of(request, self._run(request))

    def _asked(self, candidate: Measurement, number: int) -> RunBlock:
        seed = self._spec.training.seed + 1 + number
        asked = RunBlock(workplace=self._workplace, spec=self._spec, candidate=candidate, block=number, seed=seed)
        # No process trains more than two blocks: how processes differ is told by as many of them as possible.
        return asked.model_copy(update={"stays": keeps_process(candidate) and not self._children.keeps_for(asked)})

    def _soak(self, candidate: Measurement) -> Soak | str:
        """The soak's result, or a sentence that says why it failed; then nothing is kept of it (see RunSoak)."""
        title = candidate.configuration.title(self._against())
        self._progress(f"soak at micro batch {candidate.micro_batch_size}: {title}")
        seconds = max(LEAST_SOAK_SECONDS, min(self._left(), self._request.seconds_limit * SOAK_SHARE))
        cache = self._workplace.job_cache
        state = cache / f"soak-{candidate.configuration.key}-{candidate.micro_batch_size}.json" if cache else None
        asked = RunSoak(
            workplace=self._workplace,
            spec=self._spec,
            candidate=candidate,
            seed=self._spec.training.seed + 101,
            seconds=seconds,
            state=state,
        )
        ending = self._run(asked)
        unsafe = isinstance(ending.last, ChildFailed) and ending.last.unsafe
        self._unsafe = ending.kind is EndingKind.out_of_memory or unsafe
        if isinstance(ending.last, Result) and ending.last.soak is not None:
            return ending.last.soak
        if state:
            state.unlink(missing_ok=True)
        outcome, reason = failure(ending)
        return f"the soak failed ({outcome}): {reason}"

    def _against(self) -> Configuration | None:
        return self._request.baseline.configuration if self._request.baseline else None

    def _run(self, request: RunBlock | RunSoak | RunReplay) -> Ending:
        ending = self._children.alone(request, self._limit(request.candidate))
        self._check(ending)
        return ending

    def _limit(self, candidate: Measurement) -> float:
        """Seconds after which a process counts as hanging: a block does once what its trial did several times.

        On top comes what trials do not do: the evaluation of a soak, and a replay by a reference that takes a while.
        """
        from worker.plan.proof import samples_of_a_replay

        pace = candidate.timing.seconds / candidate.timing.samples if candidate.timing else 0.0
        verify = self._spec.search.verify
        facts = candidate.dataset
        long = facts.longest * facts.rows / facts.tokens if facts else 1.0  # times the mean length
        longest = (candidate.evaluation_batch_size or 1) * long
        beyond = EVALUATED[verify] + longest + REFERENCE_TIMES * samples_of_a_replay(self._spec, candidate)
        return 120.0 + 4 * sum(candidate.time_spent.values()) + self._request.seconds_limit * SOAK_SHARE + pace * beyond

    def _check(self, ending: Ending) -> None:
        """Keep a child's log; _Ended or JobFailed when its end is that of the whole verification."""
        self.log = (self.log + ending.log)[-MOST_LOG:]
        if ending.kind is EndingKind.ended:
            raise _Ended
        if isinstance(ending.last, ChildFailed) and ending.last.whole_job:
            raise JobFailed(ending.reason, self.log)


def _block_of(request: RunBlock, ending: Ending) -> Block:
    if isinstance(ending.last, Result) and ending.last.block is not None:
        return ending.last.block
    outcome, reason = failure(ending)
    key = request.candidate.configuration.key
    return Block(key=key, block=request.block, seed=request.seed, outcome=outcome, reason=reason)


def lowered(candidate: Measurement) -> Measurement | None:
    """The candidate at the next smaller micro batch that divides its effective batch or its own micro batch, or None.

    With it, half as many samples are evaluated at a time.
    """
    micro, effective = candidate.micro_batch_size or 1, candidate.configuration.effective_batch_size
    smaller = [size for size in range(1, micro) if effective % size == 0 or micro % size == 0]
    if not smaller or candidate.configuration.levers["optimizer"] in WHOLE_STEP:
        return None
    steps = -(-(candidate.gradient_accumulation_steps or 1) * micro // smaller[-1])
    evaluated = max(1, (candidate.evaluation_batch_size or micro) // 2)  # the evaluation may be what ran out of memory
    changes = {
        "micro_batch_size": smaller[-1],
        "gradient_accumulation_steps": steps,
        "evaluation_batch_size": evaluated,
    }
    return candidate.model_copy(update=changes)
