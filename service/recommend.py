"""Computes the recommendation from a job's history, as a pure function without I/O or clock."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from service import __version__
from service.aims import instead
from service.comparisons import waterfall
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec, Method
from service.contract.measurement import (
    NORMAL,
    PROCESS_SPREAD,
    Measurement,
    Verdict,
    Verification,
    timings_of,
)
from service.contract.objective import (
    counted_seconds,
    counts_once,
    is_too_slow,
    least_disturbed,
    minimises_memory,
    proven_peak,
    ranked,
    run_seconds,
    seconds_beside,
    training_seconds,
)
from service.contract.recommendation import (
    Evidence,
    Recommendation,
    RecommendedConfiguration,
    Winner,
)
from service.contract.states import Origin
from service.contract.task import TrialRecord
from service.exports.arguments import arguments
from service.headline import figure
from service.levers import as_fixed
from service.levers.batching import BUDGETED, ROWS
from service.remarks import remarks
from service.stability import rejected, stability

MANY_ALTERNATIVES = 5
NO_TASKS: Mapping[str, float] = {}


def recommend(
    job_id: str,
    spec: JobSpec,
    facts: HardwareFacts,
    history: tuple[TrialRecord, ...],
    verifications: dict[str, Verification | None],
    notes: tuple[str, ...] = (),
    final: bool = True,
    spent: Mapping[str, float] = NO_TASKS,
) -> Recommendation | None:
    """The best answer so far: of the methods' winners the best, stable ones first. None without a good trial.

    `spent` are seconds by the job's tasks, as `history.time_of_tasks` counts them.
    """
    good = least_disturbed(record.measurement for record in history)
    baselines, winners = baselines_of(history, good), dict[str, Winner]()
    for method in spec.method:
        mine = [one for one in good if one.configuration.method == method]
        verification = verifications.get(method)
        if winner := _winner(spec, not facts.has_own_memory, mine, baselines.get(method), verification):
            winners[method] = winner
    if not winners:
        return None
    best = min(winners.values(), key=lambda winner: (winner.stability.stable is not True, _value(spec, winner)))
    dataset = best.evidence.measurement.dataset
    chosen = {winner.evidence.measurement.configuration.key for winner in winners.values()}
    unstable = {one.key for found in verifications.values() if found for one in found.verdicts if not one.stable}
    not_unstable = [one for one in good if one.configuration.key not in unstable]
    others = [one for one in ranked(spec, not_unstable, baselines) if one.configuration.key not in chosen]
    sound = [one for one in not_unstable if as_fixed(spec, one.configuration)]
    verified = as_verified(best)
    return Recommendation(
        **{name: getattr(best, name) for name in Winner.model_fields},
        job_id=job_id,
        job_name=spec.name,
        final=final,
        weights=_weights(spec),
        notes=notes + (dataset.notes if dataset else ()) + remarks(spec, best, winners.values(), verified, sound),
        methods=winners,
        environment=_environment(facts),
        dataset=dataset,
        alternatives=tuple(others[:MANY_ALTERNATIVES]),
        contributions=waterfall(
            spec, best.evidence.measurement, best.evidence.baseline, history, best.verdicts
        ).contributions,
        instead=instead(spec, verified, sound, baselines),
        rejected=rejected(spec, history, verifications, best.evidence.peak_bytes),
        time_spent=_time_spent(history, verifications, spent),
        spec=_pinned(spec, best.evidence.measurement).model_dump(mode="json"),
        reproduce="dynotune tune recommendation.json",
    )


def _pinned(spec: JobSpec, measured: Measurement) -> JobSpec:
    """The job at the commits of the hub that were measured, so that what is trained later is what was measured."""
    model, dataset = spec.model, spec.dataset
    if commit := measured.model_revision:
        model = model.model_copy(update={"revision": commit})
    if measured.dataset and (commit := measured.dataset.revision):
        dataset = dataset.model_copy(update={"revision": commit})
    return spec.model_copy(update={"model": model, "dataset": dataset})


def baselines_of(history: tuple[TrialRecord, ...], good: list[Measurement]) -> dict[Method, Measurement]:
    """Method -> the measurement of its baseline, for those of which one ran to its end."""
    asked = {one.measurement.configuration.key for one in history if one.request.origin is Origin.baseline}
    found: dict[Method, Measurement] = {}
    for one in good:
        if one.configuration.key in asked:
            found.setdefault(one.configuration.method, one)
    return found


def _winner(
    spec: JobSpec,
    on_host: bool,
    good: list[Measurement],
    baseline: Measurement | None,
    verification: Verification | None,
) -> Winner | None:
    """The best of a method's good measurements, the verified and stable ones first."""
    fixed = [one for one in good if as_fixed(spec, one.configuration)]  # the baseline need not have what is fixed
    by_key = {one.configuration.key: one for one in fixed}
    verdicts = {verdict.key: verdict for verdict in verification.verdicts} if verification else {}
    order = [by_key[key] for key in (verification.ranking if verification else ()) if key in by_key]
    baselines = {baseline.configuration.method: baseline} if baseline else {}
    order += [one for one in ranked(spec, fixed, baselines) if one not in order]
    for measurement in order:
        verdict = verdicts.get(measurement.configuration.key)
        if verdict is None or verdict.stable:
            return _build(spec, on_host, measurement, baseline, verdict, verification)
    return None


def _build(
    spec: JobSpec,
    on_host: bool,
    measurement: Measurement,
    baseline: Measurement | None,
    verdict: Verdict | None,
    verification: Verification | None,
) -> Winner:
    recommended = _recommended(measurement, verdict)
    evidence = _evidence(spec, measurement, baseline, verdict, verification)
    verdicts = verification.verdicts if verification else ()
    return Winner(
        configuration=recommended,
        **arguments(spec, recommended, on_host, measurement.weights_dtype),
        evidence=evidence.model_copy(update={"objective": figure(spec, evidence, verdicts)}),
        stability=stability(spec, verdict, verification),
        verdicts=verdicts,
    )


def _recommended(measurement: Measurement, verdict: Verdict | None) -> RecommendedConfiguration:
    """What was measured as the user is to run it: at the micro batch to which a soak may have lowered it."""
    assert measurement.micro_batch_size is not None
    configuration, soak = measurement.configuration, verdict.soak if verdict else None
    micro, accumulation = measurement.micro_batch_size, measurement.gradient_accumulation_steps or 1
    evaluated = (soak and soak.evaluation_batch_size) or measurement.evaluation_batch_size or micro
    if verdict and verdict.micro_batch_size:
        micro, accumulation = verdict.micro_batch_size, -(-accumulation * micro // verdict.micro_batch_size)
    budgeted = configuration.levers["batching"] in BUDGETED
    return RecommendedConfiguration(
        method=configuration.method,
        levers=configuration.levers,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        effective_batch_size=configuration.effective_batch_size,
        evaluation_batch_size=evaluated,
        learning_rate=configuration.learning_rate,
        token_budget=micro * measurement.dataset.longest if budgeted and measurement.dataset else None,
        adapter_excludes=measurement.adapter_excludes,
        adapter_saves=measurement.adapter_saves,
        rows_are_packed=configuration.levers["batching"] in ROWS,
    )


def _evidence(
    spec: JobSpec,
    measurement: Measurement,
    baseline: Measurement | None,
    verdict: Verdict | None,
    verification: Verification | None,
) -> Evidence:
    """The figures: by the verification's blocks where there are some, else by the trial."""
    assert measurement.timing is not None
    blocks = (verdict.timing if verdict else None) or measurement.timing
    ran = verification.blocks if verification else ()
    every = timings_of(ran, measurement.configuration.key) or [measurement.timing]
    speedup, low, high, source = _speedup(spec, measurement, baseline, verdict)
    peak, capacity = proven_peak(measurement, verdict), measurement.capacity_bytes
    seconds = run_seconds(spec, measurement, blocks)
    theirs = _with_baseline(spec, seconds, training_seconds(spec, measurement, blocks), speedup, baseline)
    return Evidence(
        measurement=measurement,
        baseline=baseline,
        speedup=speedup,
        speedup_low=low,
        speedup_high=high,
        speedup_from=source,
        tokens_per_second=blocks.tokens / blocks.seconds,
        tokens_per_second_low=min(one.tokens / one.high for one in every),
        tokens_per_second_high=max(one.tokens / one.low for one in every),
        samples_per_second=blocks.samples / blocks.seconds,
        step_seconds=blocks.seconds / blocks.steps,
        peak_bytes=peak,
        headroom_bytes=None if peak is None or capacity is None else capacity - peak,
        run_seconds=seconds,
        baseline_run_seconds=theirs,
        run_cost=_cost(spec, seconds),
        baseline_run_cost=_cost(spec, theirs),
    )


def as_verified(winner: Winner) -> Measurement:
    """The winner's measurement with the verified peak.

    If the soak lowered the micro batch, it has that micro batch and its timing.
    """
    evidence, verdict = winner.evidence, winner.stability.verdict
    changes: dict[str, Any] = {"peak_bytes": evidence.peak_bytes}
    if verdict and verdict.micro_batch_size:
        changes["micro_batch_size"] = verdict.micro_batch_size
        changes["timing"] = verdict.timing or evidence.measurement.timing
    return evidence.measurement.model_copy(update=changes)


def _with_baseline(
    spec: JobSpec, run: float, training: float, speedup: float | None, baseline: Measurement | None
) -> float | None:
    """The seconds of the run with the baseline, by the speed-up of the run or, for throughput, of its training."""
    if speedup is None or baseline is None:
        return None
    if counts_once(spec):
        return run * speedup
    return training * speedup + seconds_beside(spec, baseline)


def _cost(spec: JobSpec, seconds: float | None) -> float | None:
    """What so many seconds cost; None where the job gives no price an hour, or there are no seconds."""
    price = spec.hardware.price_per_hour
    return price * seconds / 3600 if price and seconds else None


def _value(spec: JobSpec, winner: Winner) -> tuple[bool, float]:
    """The key by which the winners of the job's methods are sorted, the best one lowest.

    With the objective memory that is the peak, of what is not slower than its baseline; else the seconds, by the
    verification's timing if there is one.
    """
    evidence, verdict = winner.evidence, winner.stability.verdict
    if minimises_memory(spec):
        return is_too_slow(evidence.speedup), float(evidence.peak_bytes or math.inf)
    return False, counted_seconds(spec, evidence.measurement, verdict.timing if verdict else None)


def _speedup(
    spec: JobSpec, measurement: Measurement, baseline: Measurement | None, verdict: Verdict | None
) -> tuple[float | None, float | None, float | None, str]:
    if verdict and verdict.speedup is not None:
        return verdict.speedup, verdict.speedup_low, verdict.speedup_high, "verification blocks, interleaved"
    if measurement is baseline:
        return 1.0, 1.0, 1.0, "it is the baseline itself"
    if baseline is None or baseline.timing is None or measurement.timing is None:
        return None, None, None, "the baseline did not run to its end, so there is nothing to compare with"
    ours, theirs = measurement.timing, baseline.timing
    ratio = counted_seconds(spec, baseline) / counted_seconds(spec, measurement)
    width = math.exp(NORMAL * math.hypot(PROCESS_SPREAD, ours.log_error, theirs.log_error))
    return ratio, ratio / width, ratio * width, "single trials, one after the other (not verified)"


def _time_spent(
    history: tuple[TrialRecord, ...], verifications: dict[str, Verification | None], spent: Mapping[str, float]
) -> dict[str, float]:
    """Seconds of all trials by phase, of the verifications in all, and of what else there was.

    `processes` is the rest of the trials' time: their processes start and end.
    """
    found: dict[str, float] = {}
    for record in history:
        for phase, seconds in record.measurement.time_spent.items():
            found[phase] = found.get(phase, 0.0) + seconds
    others = dict(spent)
    rest = others.pop("trials", 0.0) - sum(found.values())
    verified = sum(one.seconds for one in verifications.values() if one)
    found |= {"processes": rest} if rest > 0 else {}
    return found | ({"verification": verified} if verified else {}) | others


def _weights(spec: JobSpec) -> str:
    if spec.model.weights == "random":
        return "random: the model was drawn, not loaded, so the losses say nothing about its use; the timings hold"
    return "pretrained"


def _environment(facts: HardwareFacts) -> dict[str, Any]:
    return {
        "device": facts.device,
        "name": facts.name,
        "memory_gib": round(facts.memory_bytes / 2**30, 2),
        "cores": facts.cores,
        "driver": facts.driver,
        "capability": facts.capability,
        "versions": facts.versions,
        "packages": {name: found.version for name, found in facts.packages.items() if found.version},
        "fingerprint": facts.fingerprint,
        "dynotune": __version__,
        "commit": facts.commit,
    }
