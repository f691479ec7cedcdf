"""Judges a verification: which finalists held, how much faster they were in the same blocks, and their order. Pure."""

from __future__ import annotations

import statistics

from service.contract.configuration import Configuration
from service.contract.job import JobSpec
from service.contract.measurement import Block, Measurement, Outcome, Soak, Verdict, Verification
from service.contract.objective import run_seconds, training_seconds
from service.contract.task import VerifyRequest

# As stable as a 2% change of the learning rate: that moved the loss by 1.3e-2 at most over 40 steps, bf16-mixed by
# 2.8e-4, a pure-bf16 run by 3.6e-2.
MOST_LOSS_DIFFERENCE = 1.3e-2
# Where steps hold other samples than the baseline's, or dropout is at work, only the unit's mean can be compared.
MOST_MEAN_DIFFERENCE = 5e-2
LEAST_CLEAN = 0.5


def judge(
    spec: JobSpec, request: VerifyRequest, blocks: tuple[Block, ...], soaks: dict[str, Soak | str]
) -> Verification:
    """The verification from its blocks and soaks; a soak given as text is the sentence of its failure."""
    baseline = request.baseline
    base_key = baseline.configuration.key if baseline else None
    candidates = [*([baseline] if baseline else []), *request.finalists]
    verdicts = [
        _verdict(candidate, baseline.configuration if baseline else None, blocks, soaks) for candidate in candidates
    ]
    cost = {candidate.configuration.key: _cost(spec, candidate, blocks) for candidate in candidates}
    stable = [verdict.key for verdict in verdicts if verdict.stable]
    ranking = tuple(sorted(stable, key=lambda key: cost[key]))
    tied = len(ranking) > 1 and _overlap(blocks, ranking[0], ranking[1])
    count = len({block.block for block in blocks})
    note = f"{count} interleaved block{'s' if count != 1 else ''}"
    note += "; the first two are tied within their intervals" if tied else ""
    shared = [block.timing for block in blocks if block.timing and block.timing.clean_share < LEAST_CLEAN]
    if shared:
        most = max(timing.largest_share_of_others for timing in shared)
        note += f"; others used up to {most:.0%} of the device in {len(shared)} of {len(blocks)} runs, so the speed-up "
        note += "is less sure than its interval says"
    return Verification(
        baseline_key=base_key, blocks=blocks, verdicts=tuple(verdicts), ranking=ranking, tied=tied, note=note + "."
    )


def _of(blocks: tuple[Block, ...], key: str) -> list[Block]:
    return [block for block in blocks if block.key == key]


def _cost(spec: JobSpec, candidate: Measurement, blocks: tuple[Block, ...]) -> float:
    measure = run_seconds if spec.search.objective == "wall-clock" else training_seconds
    timings = [block.timing for block in _of(blocks, candidate.configuration.key) if block.timing]
    if not timings:
        return float("inf")
    # The trial counts as one more run: on a noisy machine each process is a few per cent off, whatever its interval.
    return statistics.median(measure(spec, candidate, timing) for timing in (*timings, candidate.timing) if timing)


def _verdict(
    candidate: Measurement, baseline: Configuration | None, blocks: tuple[Block, ...], soaks: dict[str, Soak | str]
) -> Verdict:
    key = candidate.configuration.key
    own = _of(blocks, key)
    reasons = [f"block {block.block + 1}: {block.reason}" for block in own if block.outcome is not Outcome.ok]
    if not own:
        reasons.append("it was not run")
    pairs = [
        (block, other)
        for block in own
        for other in blocks
        if baseline and other.key == baseline.key and other.block == block.block and block.timing and other.timing
    ]
    difference = None
    if baseline is not None and key != baseline.key and pairs:
        same_steps = _same_steps(candidate.configuration, baseline) and not any(block.dropout for block in own)
        most = MOST_LOSS_DIFFERENCE if same_steps else MOST_MEAN_DIFFERENCE
        difference = max(_difference(block.losses, other.losses, same_steps) for block, other in pairs)
        if difference > most:
            what = "a step's loss" if same_steps else "the mean loss"
            reasons.append(
                f"{what} is {difference:.1%} away from the baseline's under the same seed; {most:.1%} allowed"
            )
    soak = soaks.get(key)
    if isinstance(soak, str):
        reasons.append(soak)
    speedup, low, high = _speedup(pairs)
    return Verdict(
        key=key,
        stable=not reasons,
        reasons=tuple(reasons),
        speedup=speedup,
        speedup_low=low,
        speedup_high=high,
        largest_loss_difference=difference,
        loss_steps=sum(len(block.losses) for block in own),
        soak=soak if isinstance(soak, Soak) else None,
    )


def _same_steps(ours: Configuration, theirs: Configuration) -> bool:
    """Whether both take the same samples in the same optimizer steps."""
    order = {"grouped"}
    batchings = {ours.levers["batching"], theirs.levers["batching"]}
    return ours.effective_batch_size == theirs.effective_batch_size and not (batchings & order)


def _difference(ours: tuple[float, ...], theirs: tuple[float, ...], same_steps: bool) -> float:
    if same_steps and len(ours) == len(theirs):
        return max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))
    mean = statistics.fmean(theirs)
    return abs(statistics.fmean(ours) - mean) / abs(mean)


def _speedup(pairs: list[tuple[Block, Block]]) -> tuple[float | None, float | None, float | None]:
    """Median of the blocks' ratios, and the widest interval that any block allows."""
    timings = [(block.timing, other.timing) for block, other in pairs if block.timing and other.timing]
    if not timings:
        return None, None, None
    return (
        statistics.median(theirs.seconds / ours.seconds for ours, theirs in timings),
        min(theirs.low / ours.high for ours, theirs in timings),
        max(theirs.high / ours.low for ours, theirs in timings),
    )


def _overlap(blocks: tuple[Block, ...], first: str, second: str) -> bool:
    ours = [block.timing for block in _of(blocks, first) if block.timing]
    theirs = [block.timing for block in _of(blocks, second) if block.timing]
    return bool(ours and theirs) and max(one.high for one in ours) >= min(one.low for one in theirs)
