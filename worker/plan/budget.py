"""The job's budget of trials and minutes: a part of the minutes, and what trials leave over, is for verification."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import PREPARE, Measurement
from service.contract.states import Origin
from service.contract.task import (
    LEAST_BLOCKS,
    LEAST_SOAK_SECONDS,
    VERIFY_SHARE,
    PlanInput,
    block_passes,
    keeps_process,
)
from service.levers import chosen, is_compiled
from service.tasks import TASKS
from worker.plan.proof import samples_of_a_replay

# Trials leave to the verification the time that it is expected to take, at least VERIFY_SHARE of the job's minutes and
# at most MOST_SHARE (docs/decisions/0008).
MOST_SHARE = 0.5
FINALISTS, FEWER = 3, 2  # of a verification; FEWER where a block of FINALISTS would take longer than LONG_BLOCK
LONG_BLOCK = 120.0  # seconds
# Processes that prove and soak a candidate: fewer for an adapter without a new head, whose reference keeps its process
# (docs/decisions/0028).
STABILITY_PROCESSES, STABILITY_WITH_ADAPTER = 5, 3
REFERENCES = 2.0  # references train this many times the replayed samples, at the slowest candidate's pace
BEGIN_SECONDS = 3.0  # of a process, before it loads the model
GRACE_SHARE = 0.1  # of the job's minutes, by which a verification may go past them where trials took longer
LEAST_VERIFY = 1.0  # seconds: a block, a proof and a soak run however little time is left
COMPILES = 2  # of a configuration: in its trial, and in the first process of the verification
HOST_CORES = 8.0  # that compile a host's kernels in the time that the catalogue says
LIMIT_FACTOR = 3.0  # times the longest trial so far: the time limit of a trial
LEAST_LIMIT = 45.0  # seconds


def searched_seconds(known: PlanInput) -> float:
    """The seconds of the search so far, without what the job's first trial took to download and to read the data."""
    prepared = (one.measurement.time_spent.get(PREPARE, 0.0) for one in known.history)
    return max(0.0, known.elapsed_seconds - max(prepared, default=0.0))


class Budget:
    """How many trials and seconds are left when a plan is made."""

    def __init__(self, known: PlanInput) -> None:
        self._known = known
        self._seconds = known.spec.search.minutes * 60
        self._elapsed = searched_seconds(known)
        trials = [one.measurement for one in known.history if one.request.origin is not Origin.baseline]
        spent = [_own_seconds(one) for one in trials]
        self._typical = statistics.median(spent) if spent else 0.0
        # The same without compiling, which `compiling` estimates for each configuration.
        self._plain = max(0.0, statistics.median(map(_without_compiling, trials))) if trials else 0.0
        self._is_first = not spent and all(one.origin is Origin.baseline for one in known.open_trials)
        self._longest = max((_own_seconds(one.measurement) for one in known.history), default=0.0)

    def left(self) -> float:
        """Seconds that are left for trials."""
        kept = max(self._seconds * VERIFY_SHARE, min(self._verification(), self._seconds * MOST_SHARE))
        return self._seconds - kept - self._elapsed

    def _verification(self) -> float:
        """About how many seconds a verification of the baseline, where it ran, and of the fastest takes."""
        ran = [one for one in self._known.history if one.measurement.timing]
        if not ran:
            return 0.0
        ordered = sorted((one.measurement for one in ran), key=lambda one: one.timing.seconds if one.timing else 0.0)
        # The slowest stands for the baseline of any method.
        beside = [ordered[-1]] if any(one.request.origin is Origin.baseline for one in ran) else []
        facts = self._known.facts
        finalists = worth_verifying(self._known.spec, facts, beside, [ordered[0]] * FINALISTS)
        return verification_seconds(self._known.spec, facts, [*beside, *finalists])

    def allows(self, planned: int) -> bool:
        """Whether another trial may begin beside `planned` new ones, as there is time for a trial of median length.

        The first beside the baseline may begin in any case: without it there would be nothing to recommend.
        """
        return self._trials_left(planned) > 0 and (self._has_time() or (self._is_first and not planned))

    def trials_left(self, planned: int) -> float:
        """About how many more trials fit beside `planned` new ones, by their number and by their median length."""
        by_number = self._trials_left(planned)
        if not self._typical:
            return by_number
        begun = len(self._known.open_trials) + planned
        return min(by_number, self._known.workers * self.left() / self._typical - begun)

    def _has_time(self) -> bool:
        return self.left() > self._typical

    def _trials_left(self, planned: int) -> int:
        return self._known.spec.search.trials - len(self._known.history) - len(self._known.open_trials) - planned

    def affords(self, configuration: Configuration) -> bool:
        """Whether there is time for this configuration; one that compiles takes longer to try and to verify.

        Where the job fixes that code is compiled, the first one may begin in any case.
        """
        if is_compiled(configuration.levers):
            enough = self.left() > (self._typical or self._longest) + COMPILES * self.compiling(configuration)
            return enough or (self._is_first and is_compiled(self._known.spec.search.fixed))
        return self._has_time() or self._is_first

    def cost(self, configuration: Configuration) -> float:
        """What a trial uses up: about its seconds where minutes limit the search, 1 where the number of trials does."""
        if not self._plain or self._trials_left(0) * self._typical <= self._known.workers * self.left():
            return 1.0
        return self._plain + self.compiling(configuration)

    def compiling(self, configuration: Configuration) -> float:
        """About how many seconds it compiles: as the catalogue says, scaled by what the job's other compiles took."""
        pace = max(
            (
                one.measurement.compile_seconds / once
                for one in self._known.history
                if (once := _once(one.measurement.configuration)) and one.measurement.compile_seconds
            ),
            default=unmeasured_pace(self._known.facts),
        )
        return pace * _once(configuration)

    def expected(self, configuration: Configuration) -> float:
        """What a trial may take in seconds: as long as the longest so far, and compiling; 0 where none has run."""
        return self._longest + self.compiling(configuration) if self._longest else 0.0

    def trial_limit(self, configuration: Configuration, origin: Origin) -> float:
        """The time limit of a trial in seconds: a few times the longest trial so far.

        The baseline may use the job's whole time, since all other trials are compared with it.
        """
        if origin is Origin.baseline or not self._longest:
            return max(LEAST_LIMIT, self._seconds)
        return max(LEAST_LIMIT, min(LIMIT_FACTOR * self.expected(configuration), self._seconds))

    def verify_seconds(self, methods: int) -> float:
        """Seconds for the next verification, when that many methods are still to be verified."""
        left, grace = self._seconds - self._elapsed, self._seconds * GRACE_SHARE
        return max(left, grace + min(0.0, left), LEAST_VERIFY) / methods


def unmeasured_pace(facts: HardwareFacts) -> float:
    """How many times as long as the catalogue says compiling takes here, until something has been compiled.

    A GPU's kernels are compiled by Triton in about that time. A host's are C++, which all its cores compile: on two, a
    layer of `examples/llama-13m` and its backward took 110 s, of 25 expected (`make demo`, 2026-11-23).
    """
    return 1.0 if facts.has_own_memory else max(1.0, HOST_CORES / facts.cores)


def verification_seconds(spec: JobSpec, facts: HardwareFacts, candidates: Sequence[Measurement]) -> float:
    """About how many seconds a verification of these takes: two blocks of all, a proof of the fastest, and a soak."""
    paces = [one.timing.seconds / one.timing.samples for one in candidates if one.timing]
    starts = [process_seconds(one) for one in candidates]
    replayed = samples_of_a_replay(spec, candidates[-1])
    held = replayed * (min(paces, default=0.0) + REFERENCES * max(paces, default=0.0))
    keeps = candidates[-1].configuration.method != "full" and not TASKS[spec.task].heads
    held += (STABILITY_WITH_ADAPTER if keeps else STABILITY_PROCESSES) * statistics.median(starts) + LEAST_SOAK_SECONDS
    compiling = sum(one.compile_seconds for one in candidates)
    return compiling + _blocks_seconds(spec, facts, candidates) + held


def worth_verifying(
    spec: JobSpec, facts: HardwareFacts, beside: list[Measurement], finalists: list[Measurement]
) -> list[Measurement]:
    """The first three finalists; or the first two, where a block of three and of those `beside` them takes minutes.

    What a third one would take in each block is the time of several trials, which is better spent on these.
    """
    most = finalists[:FINALISTS]
    if most and _blocks_seconds(spec, facts, [*beside, *most]) > LEAST_BLOCKS * LONG_BLOCK:
        return most[:FEWER]
    return most


def _blocks_seconds(spec: JobSpec, facts: HardwareFacts, candidates: Sequence[Measurement]) -> float:
    """About how many seconds LEAST_BLOCKS blocks of these take: processes that start, warm up and train the unit."""
    timed = [(one, one.timing.seconds) for one in candidates if one.timing]
    passes = block_passes(max((seconds for _, seconds in timed), default=math.inf), spec.search.minutes)
    units = sum(passes * seconds + warm_seconds(one, seconds, facts) for one, seconds in timed)
    starts = LEAST_BLOCKS * sum(map(process_seconds, candidates))
    # The last of a block begins the next one, in the same process where that is worth it.
    return starts - (process_seconds(candidates[-1]) if keeps_process(candidates[-1]) else 0.0) + LEAST_BLOCKS * units


def block_seconds(spec: JobSpec, facts: HardwareFacts, candidate: Measurement) -> float:
    """About how many seconds a block of one candidate takes."""
    return _blocks_seconds(spec, facts, [candidate]) / LEAST_BLOCKS


def warm_seconds(candidate: Measurement, unit_seconds: float, facts: HardwareFacts) -> float:
    """Seconds of a block's warm-up, which runs each shape of the unit once: what its trial's took, a pass at most."""
    if not facts.has_own_memory and not is_compiled(candidate.configuration.levers):
        return 0.0
    share = candidate.timing.timed_share if candidate.timing else 1.0  # a block trains what the trial left out, too
    return min(unit_seconds, candidate.time_spent.get("warm-up", unit_seconds) / share)


def process_seconds(measured: Measurement) -> float:
    """About how many seconds a process takes until it trains: its start, its data and its model."""
    return BEGIN_SECONDS + sum(measured.time_spent.get(phase, 0.0) for phase in ("data", "load", "build"))


def _own_seconds(measured: Measurement) -> float:
    """The seconds of a trial without the preparation (download, tokenising) that it did for all trials after it."""
    return sum(measured.time_spent.values()) - measured.time_spent.get(PREPARE, 0.0)


def _without_compiling(measured: Measurement) -> float:
    return _own_seconds(measured) - measured.compile_seconds


def _once(configuration: Configuration) -> float:
    """The seconds that its choices are expected to take once, before the first step."""
    return sum(choice.effect.once for choice in chosen(configuration.levers))
