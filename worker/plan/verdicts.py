"""Judges a verification: which finalists are stable, how much faster they are in the same blocks, and their order."""

from __future__ import annotations

import statistics

from service.contract.configuration import Configuration
from service.contract.job import JobSpec
from service.contract.measurement import Block, Measurement, Outcome, Soak, Timing, Verdict, Verification
from service.contract.objective import score, smallest_within
from service.contract.task import VerifyRequest
from service.levers import as_fixed, chosen

# The largest relative difference of a step's loss that still counts as stable. A 2% change of the learning rate made
# 1.3e-2 at most over 40 steps; mixed precision with bf16 made 2.8e-4, and training in pure bf16 3.6e-2.
MOST_LOSS_DIFFERENCE = 1.3e-2
# The same for the mean loss of the work unit. Only means can be compared where the steps have other samples than the
# reference's steps, or where dropout is on.
MOST_MEAN_DIFFERENCE = 5e-2


def judge(
    spec: JobSpec, request: VerifyRequest, blocks: tuple[Block, ...], soaks: dict[str, Soak | str]
) -> Verification:
    """The verification from its blocks and soaks. An entry of `soaks` that is a sentence says why that soak failed."""
    baseline = request.baseline
    candidates = [*([baseline] if baseline else []), *_run(request, blocks)]
    verdicts = [_verdict(spec, candidate, request, blocks, soaks) for candidate in candidates]
    cost = {candidate.configuration.key: _cost(spec, candidate, blocks) for candidate in candidates}
    asked = {one.configuration.key for one in candidates if as_fixed(spec, one.configuration)}
    stable = [verdict.key for verdict in verdicts if verdict.stable and verdict.key in asked]
    order = sorted(stable, key=lambda key: cost[key])
    if spec.training.effective_batch_size is None:
        sizes = {one.configuration.key: one.configuration.effective_batch_size for one in candidates}
        order = smallest_within(order, cost, sizes)
    tied = len(order) > 1 and _overlap(blocks, order[0], order[1])
    return Verification(
        baseline_key=baseline.configuration.key if baseline else None,
        blocks=blocks,
        verdicts=tuple(verdicts),
        ranking=tuple(order),
        tied=tied,
        note=_note(blocks, tied),
    )


def _run(request: VerifyRequest, blocks: tuple[Block, ...]) -> list[Measurement]:
    """The finalists, and those reserves that have run because no finalist was stable."""
    seen = {block.key for block in blocks}
    return [*request.finalists, *(one for one in request.reserves if one.configuration.key in seen)]


def _note(blocks: tuple[Block, ...], tied: bool) -> str:
    count = len({block.block for block in blocks})
    note = f"{count} interleaved block{'s' if count != 1 else ''}"
    note += "; the first two are tied within their intervals" if tied else ""
    timings = [block.timing for block in blocks if block.timing]
    unknown = sum(timing.clean_share is None for timing in timings)
    if unknown:
        note += f"; in {unknown} of {len(blocks)} runs the device did not tell whether others used it, so that nobody "
        note += "knows how clean they are"
    shared = [timing for timing in timings if timing.is_disturbed]
    if shared:
        most = max(timing.largest_share_of_others or 0.0 for timing in shared)
        note += f"; others used up to {most:.0%} of the device in {len(shared)} of {len(blocks)} runs, so the speed-up "
        note += "is less sure than its interval says"
    return note + "."


def _of(blocks: tuple[Block, ...], key: str) -> list[Block]:
    return [block for block in blocks if block.key == key]


def _timings(blocks: tuple[Block, ...], key: str) -> list[Timing]:
    return [block.timing for block in _of(blocks, key) if block.timing]


def _cost(spec: JobSpec, candidate: Measurement, blocks: tuple[Block, ...]) -> float:
    timings = _timings(blocks, candidate.configuration.key)
    if not timings:
        return float("inf")
    # The trial's timing counts like a block's: on a noisy machine, each process's pace is a few per cent off, which its
    # own interval does not show.
    return statistics.median(score(spec, candidate, timing) for timing in (*timings, candidate.timing) if timing)


def _verdict(
    spec: JobSpec,
    candidate: Measurement,
    request: VerifyRequest,
    blocks: tuple[Block, ...],
    soaks: dict[str, Soak | str],
) -> Verdict:
    key = candidate.configuration.key
    own = _of(blocks, key)
    reasons = [f"block {block.block + 1}: {block.reason}" for block in own if block.outcome is not Outcome.ok]
    if not own:
        reasons.append("it was not run")
    difference, compared, reason = _compare(candidate, request, own, blocks)
    reasons += [reason] if reason else []
    soak = soaks.get(key)
    lowered = isinstance(soak, Soak) and soak.micro_batch_size not in (None, candidate.micro_batch_size)
    if isinstance(soak, str):
        reasons.append(soak)
    speedup, low, high = _speedup(spec, candidate, request.baseline, blocks)
    timings = sorted(_timings(blocks, key), key=lambda timing: timing.seconds / timing.tokens)
    return Verdict(
        key=key,
        stable=not reasons,
        reasons=tuple(reasons),
        micro_batch_size=soak.micro_batch_size if lowered and isinstance(soak, Soak) else None,
        timing=timings[len(timings) // 2] if timings else None,
        speedup=speedup,
        speedup_low=low,
        speedup_high=high,
        largest_loss_difference=difference,
        loss_steps=compared,
        soak=soak if isinstance(soak, Soak) else None,
    )


def _reference(request: VerifyRequest, blocks: tuple[Block, ...]) -> Measurement | None:
    """The measurement whose losses the others are compared with: the fp32 reference if it ran, else the baseline."""
    reference = request.reference
    ran = reference and any(block.outcome is Outcome.ok for block in _of(blocks, reference.configuration.key))
    return reference if ran else request.baseline


def _compare(
    candidate: Measurement, request: VerifyRequest, own: list[Block], blocks: tuple[Block, ...]
) -> tuple[float | None, int, str | None]:
    """(largest relative difference of losses, number of steps compared, why the difference is too large, or None)."""
    reference = _reference(request, blocks)
    if reference is None or candidate in (reference, request.baseline):
        return None, 0, None
    ours, theirs = candidate.configuration, reference.configuration
    pairs = [
        (block, other)
        for block in own
        for other in _of(blocks, theirs.key)
        if other.block == block.block and block.losses and other.losses
    ]
    # With another effective batch, the same samples make another number of updates, so the losses are not comparable.
    if not pairs or ours.effective_batch_size != theirs.effective_batch_size:
        return None, 0, None
    same_steps = _same_steps(ours, theirs) and not any(block.dropout for block in own) and not _learns_otherwise(ours)
    most = MOST_LOSS_DIFFERENCE if same_steps else MOST_MEAN_DIFFERENCE
    difference = max(_difference(block.losses, other.losses, same_steps) for block, other in pairs)
    if _learns_otherwise(ours):
        # The user allowed another optimizer or adapter. Its losses may differ, so they only must not be higher.
        difference = max(0.0, *(_above(block.losses, other.losses) for block, other in pairs))
    steps = sum(len(block.losses) for block, _ in pairs)
    if difference <= most:
        return difference, steps, None
    what = "a step's loss" if same_steps else "the mean loss"
    name = "baseline's" if reference is request.baseline else "fp32 reference's"
    return difference, steps, f"{what} is {difference:.1%} away from the {name} under the same seed; {most:.1%} allowed"


def _learns_otherwise(configuration: Configuration) -> bool:
    return any(choice.changes_learning for choice in chosen(configuration.levers))


def _above(ours: tuple[float, ...], theirs: tuple[float, ...]) -> float:
    mean = statistics.fmean(theirs)
    return (statistics.fmean(ours) - mean) / abs(mean)


def _same_steps(ours: Configuration, theirs: Configuration) -> bool:
    """Whether both take the same samples in the same optimizer steps."""
    return not any(choice.changes_order for choice in chosen(ours.levers) + chosen(theirs.levers))


def _difference(ours: tuple[float, ...], theirs: tuple[float, ...], same_steps: bool) -> float:
    if same_steps and len(ours) == len(theirs):
        return max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))
    mean = statistics.fmean(theirs)
    return abs(statistics.fmean(ours) - mean) / abs(mean)


def _speedup(
    spec: JobSpec, candidate: Measurement, baseline: Measurement | None, blocks: tuple[Block, ...]
) -> tuple[float | None, float | None, float | None]:
    """(speed-up by the job's objective, the low end of its interval, the high end).

    The speed-up is the median of the blocks' ratios; the interval is wide enough to contain each block's interval.
    """
    if baseline is None:
        return None, None, None
    pairs = [
        (block.timing, other.timing)
        for block in _of(blocks, candidate.configuration.key)
        for other in _of(blocks, baseline.configuration.key)
        if other.block == block.block and block.timing and other.timing
    ]
    if not pairs:
        return None, None, None

    def ratio(theirs: Timing, their_end: str, ours: Timing, our_end: str) -> float:
        slow = theirs.model_copy(update={"seconds": getattr(theirs, their_end)})
        fast = ours.model_copy(update={"seconds": getattr(ours, our_end)})
        return score(spec, baseline, slow) / score(spec, candidate, fast)

    return (
        statistics.median(ratio(theirs, "seconds", ours, "seconds") for ours, theirs in pairs),
        min(ratio(theirs, "low", ours, "high") for ours, theirs in pairs),
        max(ratio(theirs, "high", ours, "low") for ours, theirs in pairs),
    )


def _overlap(blocks: tuple[Block, ...], first: str, second: str) -> bool:
    ours, theirs = _timings(blocks, first), _timings(blocks, second)
    return bool(ours and theirs) and max(one.high for one in ours) >= min(one.low for one in theirs)
