"""What the catalogue expects of the choices of one job, before they are measured: logarithms of factors on seconds."""

from __future__ import annotations

import math
import statistics

import numpy as np

from service.contract.measurement import Outcome
from service.contract.objective import counts_once
from service.levers import LEVERS
from service.levers.base import Effect
from service.scaling import TRAINER_BATCH
from worker.plan.budget import unmeasured_pace
from worker.plan.grid import EFFECTIVE, Floats, Grid, Rows, look_up
from worker.plan.view import View, was_given_too_much

# Expected factor of a choice that a job asks for by name although this hardware lacks what makes it fast: it is
# emulated, or takes cores from the training. How slow that is, nobody knows (docs/decisions/0019), so it is chosen and
# not measured. If it is far larger, what the user named is hardly tried; if far smaller, it is tried among the first.
SLOWED, SLOWED_SPREAD = 1.5, 0.4
# Of what a device computes, the share that is padding, where nothing is known of the data's lengths yet: chosen. In the
# four datasets of `python -m benchmarks.packing` it is 12% to 45% (docs/measured.md). If it is far off, those without
# padding come too early or too late among the trials that begin before one has told the lengths.
PADDED_SHARE = 0.4
# So many tokens in a micro batch keep a GPU busy, so that a larger one would hardly be faster. Of 2,048, 4,096 and
# 8,192 it is what did best in benchmarks/simulated_gpu.py.
BUSY_TOKENS = 2048
# Expected factor for an effective batch of twice the size: fewer, larger passes and updates. Like the catalogue's
# effects it is a guess, not measured: a wrong one costs trials, not the answer (docs/decisions/0019).
DOUBLING = 0.93
DOUBLING_SPREAD = 0.1  # standard deviation of that factor's logarithm


class Prior:
    """Expected effects of a job's choices on the logarithm of the seconds, and how unsure each of them is.

    `mean`, `spread` and `families` are tables (columns, options) of the grid; options of a column with the same number
    above 0 are of one family. A choice that is measured to do something else is corrected by the surrogate; the less
    sure the prior, the faster.
    """

    def __init__(self, view: View, grid: Grid) -> None:
        choices = {
            (name, choice.name): choice
            for name, lever in LEVERS.items()
            for choice in lever.choices
            if choice.name != lever.baseline
        }
        limited, half, padding = is_limited(view), view.is_half(), padded_share(view)
        own = view.facts.has_own_memory
        slowed = {of for of, one in choices.items() if one.is_slowed(view.facts)}
        factors = {
            of: math.log(SLOWED if of in slowed else _factor(one.effect, limited, half, own, padding))
            for of, one in choices.items()
        }
        spreads = {of: SLOWED_SPREAD if of in slowed else one.effect.spread for of, one in choices.items()}
        smallest = min(view.effectives)
        for size in grid.effectives():
            doublings = math.log2(int(size) / smallest)
            factors[EFFECTIVE, size] = doublings * math.log(DOUBLING)
            spreads[EFFECTIVE, size] = abs(doublings) ** 0.5 * DOUBLING_SPREAD
        self.mean = grid.table(factors)
        self.spread = grid.table(spreads)
        self.families = grid.table(_families(grid))
        self._together = [
            ([(grid.names.index(name), grid.members(name, options)) for name, options in one.when.items()], one.factor)
            for lever in LEVERS.values()
            for one in lever.together
        ]
        self._once = grid.table(_once(view, {of: one.effect.once for of, one in choices.items() if one.effect.once}))

    def expected(self, rows: Rows) -> Floats:
        """The expected logarithm of each row's seconds, relative to the levers' baselines."""
        found: Floats = look_up(self.mean, rows).sum(axis=1)
        for parts, factor in self._together:
            found += math.log(factor) * np.all([members[rows[:, column]] for column, members in parts], axis=0)
        return found

    def once(self, rows: Rows) -> Floats:
        """The seconds that a run of each row takes before its first step, where the job's objective counts them."""
        found: Floats = look_up(self._once, rows).sum(axis=1)
        return found


def _families(grid: Grid) -> dict[tuple[str, str], float]:
    """(lever, choice) -> the number of its family; all effective batches are of one."""
    found = {(EFFECTIVE, size): 1.0 for size in grid.effectives()}
    for name, lever in LEVERS.items():
        for number, family in enumerate(lever.families, start=1):
            found |= {(name, choice): float(number) for choice in family}
    return found


def _once(view: View, expected: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """(lever, choice) -> seconds that it takes once: as measured, or as `expected`, scaled by what was."""
    if not counts_once(view.spec):
        return {}
    measured: dict[tuple[str, str], list[float]] = {}
    for one in view.good:
        mine = [of for of in one.configuration.levers.items() if of in expected]
        for of in mine:  # each has its share of what they took together
            share = expected[of] / sum(expected[other] for other in mine)
            measured.setdefault(of, []).append(one.compile_seconds * share)
    known = {of: statistics.median(seconds) for of, seconds in measured.items()}
    scale = statistics.median([known[of] / expected[of] for of in known]) if known else unmeasured_pace(view.facts)
    return {of: known.get(of, seconds * scale) for of, seconds in expected.items()}


def _factor(effect: Effect, limited: bool, half: bool, own: bool, padding: float) -> float:
    """The expected factor on the seconds where these circumstances hold."""
    held = [
        factor
        for factor, holds in ((effect.limited, limited and own), (effect.host, not own), (effect.half, half))
        if factor is not None and holds
    ]
    return (held[0] if held else effect.factor) * (1 - effect.padding * padding)


def is_limited(view: View) -> bool:
    """Whether a larger micro batch than the fastest one's would be faster and does not fit.

    Before anything ran: whether something did not fit at any micro batch.
    """
    if not view.good:
        return short_of_memory(view)
    best = view.good[0]
    if best.predicted_micro_batch is None:  # it was given its micro batch, and no larger one was looked for
        return bool(best.peak_bytes and best.capacity_bytes and 2 * best.peak_bytes > best.capacity_bytes)
    most = best.predicted_micro_batch
    if view.facts.has_own_memory and best.timing is not None:
        micro_batches = best.timing.steps * (best.gradient_accumulation_steps or 1)
        if best.timing.padded_tokens >= BUSY_TOKENS * micro_batches:
            return False
    return most < best.configuration.effective_batch_size and most < 2 * (best.micro_batch_size or 1)


def short_of_memory(view: View) -> bool:
    """Whether a trial did not fit at any micro batch."""
    return any(one.outcome is Outcome.infeasible and not was_given_too_much(one) for one in view.history)


def padded_share(view: View) -> float:
    """The share of padding where micro batches of Trainer's size are padded to their longest, by the data's lengths."""
    facts = next((one.dataset for one in view.history if one.dataset), None)
    if facts is None or not facts.histogram:
        return PADDED_SHARE
    edges = sorted((int(edge), rows) for edge, rows in facts.histogram.items() if rows)
    total = sum(rows for _, rows in edges)
    mean = sum(edge * rows for edge, rows in edges) / total
    longest, below, up_to = 0.0, 0.0, 0
    for edge, rows in edges:
        up_to += rows
        at_most = (up_to / total) ** TRAINER_BATCH  # the probability that the longest of a micro batch is within edge
        longest += edge * (at_most - below)
        below = at_most
    return max(0.0, 1 - mean / longest)
