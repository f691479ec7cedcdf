"""How many times faster one candidate of a verification is than another, with an interval, and when that is settled."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from service.contract.job import JobSpec
from service.contract.measurement import NORMAL, PROCESS_SPREAD, Block, Measurement
from service.contract.objective import (
    SMALLEST_WITHIN,
    counted_seconds,
    counts_once,
    is_too_slow,
    minimises_memory,
    score,
    seconds_beside,
)
from service.contract.task import VerifyRequest

SURE_WITHIN = 0.05  # half the width of the speed-up's interval at which it is settled
SEEN = 4  # pairs of processes that PROCESS_SPREAD counts as, beside the blocks' own
# Candidates whose ratio is surely this close to 1 count as tied. Not less than PROCESS_SPREAD, about the half-width
# of an interval after four blocks at the least, or none would count as tied before a verification's last block.
TIED_WITHIN = 0.02
# Standard deviation of the logarithm of what a run takes beside its steps (loading, compiling, evaluating), which a
# trial sees once: chosen, not measured. Blocks do not tell it, however many there are.
BESIDE_SPREAD = 0.1
# The share of clean timings from which on a block counts as undisturbed, so that it counts like all others that are
# (docs/decisions/0047): chosen, not measured. If it is far smaller, blocks that others disturbed count as much as quiet
# ones. At 1, hardly any block of a shared machine is quiet, and each counts by its own scatter again.
QUIET = 0.9

Ratio = tuple[float, float, float]


def ratio(spec: JobSpec, blocks: tuple[Block, ...], ours: Measurement, theirs: Measurement) -> Ratio | None:
    """(their seconds over ours in the blocks that both ran in, low, high): the 95% interval. None without a block.

    The seconds are those that the job's objective counts. The interval is that of the blocks, wider by how unsure the
    seconds beside the steps are, where these count.
    """
    return _widened(spec, by_blocks(spec, blocks, ours, theirs), ours, theirs)


def _widened(spec: JobSpec, found: Ratio | None, ours: Measurement, theirs: Measurement) -> Ratio | None:
    """A ratio by blocks with the interval of the whole run's seconds, as `ratio` says."""
    if found is None or not counts_once(spec):
        return found
    shares = [seconds_beside(spec, one) / counted_seconds(spec, one) for one in (ours, theirs)]
    beside = [NORMAL * BESIDE_SPREAD * share for share in shares]
    times = math.exp(math.hypot(math.log(found[2] / found[0]), *beside))
    return found[0], found[0] / times, found[0] * times


def by_blocks(spec: JobSpec, blocks: tuple[Block, ...], ours: Measurement, theirs: Measurement) -> Ratio | None:
    """`ratio` with the interval that blocks tell, and more blocks make narrower.

    The variance has two parts: that within a block, from its turns or, where the candidates were not alive together,
    from the intervals of their timings; and that between pairs of processes. Two or three blocks do not tell the latter
    by themselves, so it is estimated as if SEEN other pairs had shown PROCESS_SPREAD, and is never less: blocks that
    scatter by more widen the interval (a scaled inverse chi-squared prior; Gelman et al., Bayesian Data Analysis,
    section 2.6). The ratio is the blocks' median, in which a block counts by the inverse of its variance, so that one
    which others disturbed says little (a random-effects meta-analysis: DerSimonian and Laird 1986); quiet ones count
    alike.
    """
    logs, within, pairs = [], [], []
    for block in blocks:
        for other in blocks:
            if (block.key, other.key) != (ours.configuration.key, theirs.configuration.key):
                continue
            if other.block == block.block and block.timing and other.timing:
                logs.append(
                    math.log(counted_seconds(spec, theirs, other.timing) / counted_seconds(spec, ours, block.timing))
                )
                within.append(standard_error(block, other))
                pairs.append((block, other))
    if not logs:
        return None
    within = pooled(within, [is_quiet(*pair) for pair in pairs])
    weights = [1 / (one**2 + PROCESS_SPREAD**2) for one in within]
    shares = [one / sum(weights) for one in weights]
    middle, between = weighted_median(logs, shares), spread_of_pairs(logs)
    own = sum((share * one) ** 2 for share, one in zip(shares, within, strict=True))
    error = math.sqrt(own + between**2 / process_pairs(pairs, shares))
    return math.exp(middle), math.exp(middle - NORMAL * error), math.exp(middle + NORMAL * error)


def pooled(errors: Sequence[float], quiet: Sequence[bool]) -> list[float]:
    """The blocks' standard errors: all quiet ones have the same, and no other has less.

    Of blocks that nobody disturbed, those in which a candidate happened not to stall scatter least. If each counted by
    its own scatter, these would decide, and a configuration that stalls would seem as fast as one that does not.
    """
    of_quiet = [error**2 for error, is_one in zip(errors, quiet, strict=True) if is_one]
    least = math.sqrt(statistics.fmean(of_quiet)) if of_quiet else 0.0
    return [least if is_one else max(error, least) for error, is_one in zip(errors, quiet, strict=True)]


def is_quiet(ours: Block, theirs: Block) -> bool:
    """Whether it is known that hardly any of the two timings was disturbed by others."""
    shares = [one.timing.clean_share if one.timing else None for one in (ours, theirs)]
    return all(share is not None and share >= QUIET for share in shares)


def weighted_median(values: Sequence[float], shares: Sequence[float]) -> float:
    """The median of values that count by their shares, which add up to 1: the usual one where all are the same.

    Half of a value's share lies on each side of it, and between two values the median is interpolated.
    """
    ordered, counts = np.array(sorted(zip(values, shares, strict=True))).T
    return float(np.interp(0.5, np.cumsum(counts) - counts / 2, ordered))


def spread_of_pairs(logs: Sequence[float]) -> float:
    """The standard deviation between pairs of processes whose ratios have these logarithms, as `ratio` says.

    It is wider by what Student's t is wider than the normal distribution, so that NORMAL may be applied to it.
    """
    count = len(logs)
    own, degrees = statistics.stdev(logs) if count > 1 else 0.0, SEEN + count - 1
    blended = math.sqrt((SEEN * PROCESS_SPREAD**2 + (count - 1) * own**2) / degrees)
    return max(PROCESS_SPREAD, blended * wider(degrees), own if count > 2 else 0.0)


def wider(degrees: int) -> float:
    """How many times as wide as the normal distribution's 95% interval Student's is, within 3% from 4 degrees on."""
    return 1 + 1.2 / degrees + 1.4 / degrees**2


def process_pairs(blocks: Sequence[tuple[Block, Block]], shares: Sequence[float]) -> float:
    """How many pairs of processes, each with a block of its own, would tell a mean ratio as well as these blocks do.

    Each block counts by its share. A process may train several blocks (docs/decisions/0028), and what is peculiar to it
    is then in all of them.
    """
    spread = 0.0
    for side in zip(*blocks, strict=True):
        share_of: defaultdict[int, float] = defaultdict(float)
        for one, share in zip(side, shares, strict=True):
            share_of[one.block if one.process is None else one.process] += share
        spread += sum(share**2 for share in share_of.values()) / 2
    return 1 / spread


def chained(
    spec: JobSpec, blocks: tuple[Block, ...], ours: Measurement, theirs: Measurement, others: Sequence[Measurement]
) -> Ratio | None:
    """The ratio of two candidates, by way of one of the others where they ran in no block together.

    Of several ways it is the one with the narrowest interval; the errors of its two ratios add up as variances.
    """
    direct = ratio(spec, blocks, ours, theirs)
    if direct is not None or ours is theirs:
        return direct
    found = []
    for one in others:
        near, far = by_blocks(spec, blocks, ours, one), by_blocks(spec, blocks, one, theirs)
        if near is not None and far is not None:
            width = math.exp(math.hypot(math.log(near[2] / near[0]), math.log(far[2] / far[0])))
            middle = near[0] * far[0]
            found.append((middle, middle / width, middle * width))
    return _widened(spec, min(found, key=lambda one: one[2] / one[0], default=None), ours, theirs)


def standard_error(ours: Block, theirs: Block) -> float:
    """The standard error of the logarithm of two candidates' ratio within a block.

    Of candidates that took turns, by how their slices differ from what is expected of them: a turn in which both are
    slow says nothing of their ratio, so only the difference counts.
    """
    mine = {one.turn: math.log(one.seconds / one.expected) for one in ours.slices}
    other = {one.turn: math.log(one.seconds / one.expected) for one in theirs.slices}
    both = [mine[turn] - other[turn] for turn in mine.keys() & other.keys()]
    if len(both) > 2:
        return wider(len(both) - 1) * statistics.stdev(both) / math.sqrt(len(both))
    return math.hypot(*(one.timing.log_error for one in (ours, theirs) if one.timing))


def relative_costs(spec: JobSpec, blocks: tuple[Block, ...], candidates: Sequence[Measurement]) -> dict[str, float]:
    """Each candidate's seconds as a share of the anchor's, in the blocks that both ran in; infinite without a block.

    The anchor is the first of those that ran in most blocks. One that ran in none of them is compared with it by way of
    another. Not every candidate runs in every block, and a shared machine may be slower in some of them, so costs of
    different blocks are never compared.
    """
    timed = {one.configuration.key: 0 for one in candidates}
    for block in blocks:
        if block.timing and block.key in timed:
            timed[block.key] += 1
    anchor = max(candidates, key=lambda one: timed[one.configuration.key])
    costs = {}
    for one in candidates:
        found = chained(spec, blocks, one, anchor, candidates) if one is not anchor else (1.0, 1.0, 1.0)
        costs[one.configuration.key] = 1 / found[0] if found and timed[one.configuration.key] else math.inf
    return costs


def settled(spec: JobSpec, request: VerifyRequest, blocks: tuple[Block, ...]) -> bool:
    """Whether the best finalist is known for sure, or tied within 2%, and its speed-up within 5%."""
    if minimises_memory(spec):
        return _bounded(spec, request, blocks)
    everyone = [*([request.baseline] if request.baseline else []), *request.finalists]
    costs = relative_costs(spec, blocks, everyone)
    running = [one for one in request.finalists if costs[one.configuration.key] < math.inf]
    if not running:
        return True
    best = min(running, key=lambda one: costs[one.configuration.key])
    if not is_sure(by_blocks(spec, blocks, best, request.baseline) if request.baseline else None):
        return False
    others = [by_blocks(spec, blocks, best, one) for one in running if one is not best]
    return all(found is None or found[1] > 1.0 or found[2] < 1 + TIED_WITHIN for found in others)


def _bounded(spec: JobSpec, request: VerifyRequest, blocks: tuple[Block, ...]) -> bool:
    """Whether the finalist of the lowest peak that is not slower than the baseline is known.

    Finalists are asked from the lowest peak upwards, which needs no blocks: each has to be known to be slower, until
    one is known not to be.
    """
    for one in sorted(request.finalists, key=lambda one: score(spec, one)):
        found = by_blocks(spec, blocks, one, request.baseline) if request.baseline else None
        if found is None and request.baseline is not None:
            continue  # it has failed in its block
        if found is None or not is_too_slow(found[1]):
            return is_sure(found)
        if not is_too_slow(found[2]):
            return False
    return True


def is_sure(speedup: Ratio | None) -> bool:
    """Whether a speed-up is known within 5%; one that cannot be known, for want of a baseline, needs no more blocks."""
    return speedup is None or speedup[2] / speedup[0] <= 1 + SURE_WITHIN


def certainly_slower(spec: JobSpec, request: VerifyRequest, blocks: tuple[Block, ...]) -> set[str]:
    """The keys of the finalists that are slower than another one for sure: no more blocks are spent on them.

    With the objective memory, those that are slower than the baseline. Only blocks that others did not disturb are
    sure: a burst of others' work that falls into the turns of one candidate alone can look like a slow candidate.
    """
    blocks = tuple(block for block in blocks if block.timing is None or not block.timing.is_disturbed)
    found, most = set(), 1.0
    faster = request.finalists
    if minimises_memory(spec):
        faster, most = (request.baseline,) if request.baseline else (), 1 + SMALLEST_WITHIN
    for one in request.finalists:
        for other in faster:
            times = by_blocks(spec, blocks, other, one) if other is not one else None
            if times and times[1] > most:
                found.add(one.configuration.key)
    return found
