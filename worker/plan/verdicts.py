"""Judges a verification: which finalists are stable, how much faster they are in the same blocks, and their order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from service.contract.job import JobSpec
from service.contract.measurement import Block, Measurement, Outcome, Soak, Verdict, Verification, timings_of
from service.contract.objective import (
    SMALLEST_WITHIN,
    is_too_slow,
    minimises_memory,
    proven_peak,
    smallest_within,
)
from service.contract.replay import Proof
from service.contract.task import VerifyRequest
from service.levers import LEVERS, as_fixed
from worker.plan.ratios import chained, ratio, relative_costs

# A simpler configuration that seems to take up to so many times as long, and not surely longer, is the answer
# (docs/decisions/0017).
UNSURE_WITHIN = 1.03


def judge(
    spec: JobSpec,
    request: VerifyRequest,
    blocks: tuple[Block, ...],
    soaks: dict[str, Soak | str],
    proofs: dict[str, Proof | str],
    unranked: AbstractSet[str] = frozenset(),
) -> Verification:
    """The verification from its blocks, soaks and proofs. Text in place of a soak or a proof says why it failed.

    The candidates with the keys `unranked` are compared with the others, but cannot be the answer.
    """
    baseline = request.baseline
    candidates = [*([baseline] if baseline else []), *_run(request, blocks)]
    verdicts = [_verdict(spec, one, request, candidates, blocks, soaks, proofs) for one in candidates]
    cost = relative_costs(spec, blocks, candidates)
    known = {one.configuration.key: one for one in candidates}
    asked = {one.configuration.key for one in candidates if as_fixed(spec, one.configuration)}
    stable = [verdict.key for verdict in verdicts if verdict.stable and verdict.key in asked - unranked]
    sizes = {one.configuration.key: _size(spec, one, baseline) for one in candidates}

    def by_pace(keys: list[str]) -> list[str]:
        fastest = sorted(keys, key=lambda key: cost[key])
        order = [known[key] for key in smallest_within(fastest, cost, sizes)]
        return _simpler_first(spec, blocks, order, known[fastest[0]], baseline) if order else []

    kept = [one for one in verdicts if one.key in stable and not is_too_slow(one.speedup)]
    if minimises_memory(spec) and kept:  # where all are slower than the baseline, the fastest comes first
        least, others = _least_first({one.key: _peak(known[one.key], one) for one in kept})
        order = [*by_pace(least), *others]
        near = order[:2] if len(least) > 1 else []
    else:
        order = by_pace(stable)
        near = order[:2]
    # With the objective memory, only candidates of about the least peak can be tied.
    tied = _tied(spec, blocks, [known[key] for key in near])
    if order:
        verdicts = [_with_slowdown(spec, blocks, one, known[one.key], known[order[0]]) for one in verdicts]
    return Verification(
        baseline_key=baseline.configuration.key if baseline else None,
        blocks=blocks,
        verdicts=tuple(verdicts),
        ranking=tuple(order),
        tied=tied,
        note=_note(blocks, tied),
    )


def _peak(candidate: Measurement, verdict: Verdict) -> float:
    """The candidate's peak bytes, as far as it was verified; infinite where they are not known."""
    return float(proven_peak(candidate, verdict) or math.inf)


def _least_first(peaks: dict[str, float]) -> tuple[list[str], list[str]]:
    """(the keys of those within 1% of the least peak, those of the others by their peak)."""
    order = sorted(peaks, key=lambda key: peaks[key])
    most = peaks[order[0]] * (1 + SMALLEST_WITHIN) if order else 0.0
    return [key for key in order if peaks[key] <= most], [key for key in order if peaks[key] > most]


def _simpler_first(
    spec: JobSpec,
    blocks: tuple[Block, ...],
    order: list[Measurement],
    fastest: Measurement,
    baseline: Measurement | None,
) -> list[str]:
    """The keys, with a simpler candidate moved to the front if the first one is not surely faster than it.

    Simpler is what has some of the first one's changed levers and no others, the fewest first: a lever that does
    nothing is measured as a gain half of the time. Nor may `fastest` be surely faster than the simpler one. It need
    not be the first: a smaller one within a percent of it comes before it.
    """
    first, changes = order[0], {one.configuration.key: _changes(one, baseline) for one in order}
    for one in sorted(order[1:], key=lambda one: len(changes[one.configuration.key])):
        same = one.configuration.effective_batch_size == first.configuration.effective_batch_size
        if same and changes[one.configuration.key].items() < changes[first.configuration.key].items():
            gains = [ratio(spec, blocks, other, one) for other in (first, fastest) if other is not one]
            if all(gain is not None and gain[1] <= 1.0 and gain[0] <= UNSURE_WITHIN for gain in gains):
                order = [one, *(other for other in order if other is not one)]
                break
    return [one.configuration.key for one in order]


def _size(spec: JobSpec, candidate: Measurement, baseline: Measurement | None) -> tuple[int, int]:
    """What makes one of two equally fast candidates the better answer: a smaller batch, then fewer changed levers."""
    given, configuration = spec.training.effective_batch_size, candidate.configuration
    return (0 if given else configuration.effective_batch_size, len(_changes(candidate, baseline)))


def _changes(candidate: Measurement, baseline: Measurement | None) -> dict[str, str]:
    """The candidate's choices that differ from the baseline's."""
    usual = baseline.configuration.levers if baseline else {name: one.baseline for name, one in LEVERS.items()}
    return {name: choice for name, choice in candidate.configuration.levers.items() if choice != usual[name]}


def _run(request: VerifyRequest, blocks: tuple[Block, ...]) -> list[Measurement]:
    """The finalists, and those reserves and finalists without one lever that have run."""
    seen = {block.key for block in blocks}
    others = {one.configuration.key: one for one in (*request.reserves, *request.taken_back)}
    return [*request.finalists, *(one for key, one in others.items() if key in seen)]


def _with_slowdown(
    spec: JobSpec, blocks: tuple[Block, ...], verdict: Verdict, candidate: Measurement, first: Measurement
) -> Verdict:
    """The verdict with the candidate's seconds over those of the first, where both ran in a block."""
    found = ratio(spec, blocks, first, candidate) if candidate is not first else None
    if found is None:
        return verdict
    return verdict.model_copy(update={"slowdown": found[0], "slowdown_low": found[1], "slowdown_high": found[2]})


def _note(blocks: tuple[Block, ...], tied: bool) -> str:
    count = len({block.block for block in blocks})
    note = f"{count} interleaved block{'s' if count != 1 else ''}"
    note += "; the first two are tied within their intervals" if tied else ""
    timings = [block.timing for block in blocks if block.timing]
    unknown = sum(timing.clean_share is None for timing in timings)
    if unknown:
        note += f"; in {unknown} of {len(blocks)} runs the device did not tell whether others used it, so that these "
        note += "are not known to be clean"
    shared = [timing for timing in timings if timing.is_disturbed]
    if shared:
        most = max(timing.largest_share_of_others or 0.0 for timing in shared)
        note += f"; others used up to {most:.0%} of the device in {len(shared)} of {len(blocks)} runs, so the speed-up "
        note += "is less sure than its interval says"
    return note + "."


def _tied(spec: JobSpec, blocks: tuple[Block, ...], first_two: list[Measurement]) -> bool:
    found = ratio(spec, blocks, *first_two) if len(first_two) == 2 else None
    return found is not None and found[1] <= 1.0


def _of(blocks: tuple[Block, ...], key: str) -> list[Block]:
    return [block for block in blocks if block.key == key]


def _verdict(
    spec: JobSpec,
    candidate: Measurement,
    request: VerifyRequest,
    candidates: Sequence[Measurement],
    blocks: tuple[Block, ...],
    soaks: dict[str, Soak | str],
    proofs: dict[str, Proof | str],
) -> Verdict:
    key = candidate.configuration.key
    own = _of(blocks, key)
    reasons = [f"block {block.block + 1}: {block.reason}" for block in own if block.outcome is not Outcome.ok]
    if not own:
        reasons.append("it was not run")
    proof, soak = proofs.get(key), soaks.get(key)
    reasons += [proof] if isinstance(proof, str) else proof.reasons if proof else []
    reasons += [soak] if isinstance(soak, str) else []
    found = chained(spec, blocks, candidate, request.baseline, candidates) if request.baseline else None
    speedup, low, high = (1.0, 1.0, 1.0) if candidate is request.baseline else found or (None, None, None)
    timings = sorted(timings_of(blocks, key), key=lambda timing: timing.seconds / timing.tokens)
    return Verdict(
        key=key,
        stable=not reasons,
        reasons=tuple(reasons),
        micro_batch_size=soak.micro_batch_size
        if isinstance(soak, Soak) and soak.micro_batch_size != candidate.micro_batch_size
        else None,
        timing=timings[len(timings) // 2] if timings else None,
        speedup=speedup,
        speedup_low=low,
        speedup_high=high,
        proof=proof if isinstance(proof, Proof) else None,
        soak=soak if isinstance(soak, Soak) else None,
    )
