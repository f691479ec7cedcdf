"""What a job's trials say when they are laid side by side: each lever's part of the speed-up, and the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Sequence

from service.contract.configuration import Configuration
from service.contract.job import JobSpec
from service.contract.measurement import NORMAL, PROCESS_SPREAD, Measurement, Outcome, Verdict
from service.contract.objective import least_disturbed, minimises_memory, score
from service.contract.recommendation import Contribution
from service.contract.task import TrialRecord
from service.contract.views import Pareto, ParetoPoint, Waterfall
from service.levers import circumstances, excluded, taken_back


def waterfall(
    spec: JobSpec,
    best: Measurement,
    baseline: Measurement | None,
    trials: Sequence[TrialRecord],
    verdicts: Sequence[Verdict] = (),
) -> Waterfall:
    """What each lever of the best configuration brings, from the runs in which it alone was taken back.

    Where these took turns with the best in the verification, by their `verdicts`, the blocks tell; else trials do. With
    the objective memory it is how much less memory the best takes, which trials tell, else how much less time.
    """
    in_turns = {one.key: one for one in verdicts if one.slowdown is not None and not minimises_memory(spec)}
    every = [one.measurement for one in trials]
    known = {one.configuration.key: one for one in (*every, *least_disturbed(every))}
    found: list[Contribution] = []
    by_blocks: set[bool] = set()
    if baseline is not None:
        # Trials without a lever searched for their micro batch, so the best's trial that did, too, is compared.
        searched = best.configuration.at_micro_batch(None)
        twin, without = known.get(searched.key, best), taken_back(spec, best.configuration, baseline.configuration)
        found = [
            _contribution(spec, twin, name, made, known.get(made.key), in_turns.get(made.key))
            for name, made in without.items()
        ]
        by_blocks = {made.key in in_turns for made in without.values()}
        found += _inseparable(spec, best.configuration, baseline.configuration, set(without))
    usual = score(spec, baseline) if baseline else math.inf
    speedup = usual / score(spec, best) if math.isfinite(usual) else None
    factors = [one.factor for one in found]
    if by_blocks == {True}:
        speedup = next((one.speedup for one in verdicts if one.key == best.configuration.key), speedup)
    complete = speedup is not None and all(factors) and len(by_blocks) < 2  # blocks and trials ran at different times
    return Waterfall(
        levers=best.configuration.levers,
        method=best.configuration.method,
        speedup=speedup,
        contributions=tuple(sorted(found, key=lambda one: -(one.factor or 0.0))),
        together=speedup / math.prod(one or 1.0 for one in factors) if complete and speedup else None,
    )


def _inseparable(
    spec: JobSpec, best: Configuration, baseline: Configuration, separable: set[str]
) -> list[Contribution]:
    """The levers that cannot be taken back alone, as the others do not go with the baseline's choice."""
    found = []
    for name, choice in best.levers.items():
        usual = baseline.levers[name]
        clash = excluded({**best.levers, name: usual, **circumstances(spec, best.method)})
        if choice != usual and name not in separable and clash is not None:
            reason = f"it cannot be taken back alone: {clash.reason}"
            found.append(
                Contribution(lever=name, baseline=usual, choice=choice, factor=None, low=None, high=None, reason=reason)
            )
    return found


def _contribution(
    spec: JobSpec,
    best: Measurement,
    lever: str,
    made: Configuration,
    without: Measurement | None,
    verdict: Verdict | None,
) -> Contribution:
    factor = low = high = None
    reason = ""
    if verdict is not None:
        factor, low, high = verdict.slowdown, verdict.slowdown_low, verdict.slowdown_high
    elif without is None:
        reason = "not measured: the search had no time for it"
    elif without.outcome is not Outcome.ok:
        reason = f"without it the configuration does not run ({without.outcome}): {without.reason}"
    elif not math.isfinite(score(spec, best) + score(spec, without)):
        reason = "the device does not tell how much memory it takes"
    else:
        factor = score(spec, without) / score(spec, best)
        errors = [one.timing.log_error for one in (best, without) if one.timing]
        width = 1.0 if minimises_memory(spec) else math.exp(NORMAL * math.hypot(PROCESS_SPREAD, *errors))
        low, high = factor / width, factor * width
    return Contribution(
        lever=lever,
        baseline=made.levers[lever],
        choice=best.configuration.levers[lever],
        factor=factor,
        low=low,
        high=high,
        reason=reason,
    )


def pareto(trials: Sequence[TrialRecord]) -> Pareto:
    """The successful trials that none beats in both tokens/s and peak memory, fastest first."""
    good = [
        (one.measurement.tokens_per_second, one.measurement.peak_bytes, one)
        for one in trials
        if one.measurement.outcome is Outcome.ok
    ]
    points: list[ParetoPoint] = []
    ordered = sorted(
        ((speed, peak, one) for speed, peak, one in good if speed and peak), key=lambda it: (-it[0], it[1])
    )
    for speed, peak, one in ordered:
        if not points or peak < points[-1].peak_bytes:
            points.append(_point(one, speed, peak))
    return Pareto(points=tuple(points))


def _point(record: TrialRecord, speed: float, peak: int) -> ParetoPoint:
    configuration = record.measurement.configuration
    return ParetoPoint(
        trial=record.request.number,
        levers=configuration.levers,
        method=configuration.method,
        micro_batch_size=record.measurement.micro_batch_size or 1,
        tokens_per_second=speed,
        peak_bytes=peak,
    )
