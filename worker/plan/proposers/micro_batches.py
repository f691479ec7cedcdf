"""The best configuration at the micro batches next to its own, where its trial has not timed them.

A trial times the micro batch that promises most, and another only where that promises a lot more. Which of two is
faster by a few percent is for the verification, in which they take turns.
"""

from __future__ import annotations

import math

from service.contract.configuration import Configuration
from service.contract.measurement import DRIFT, Measurement
from service.contract.objective import counted_seconds
from service.contract.states import Origin
from service.levers.batching import BUDGETED, ROWS
from service.levers.optimizer import WHOLE_STEP
from worker.plan.proposers import Proposal, first_affordable
from worker.plan.view import View

TIMES_APART = 1.5  # times as large or as small is a micro batch that is worth a trial of its own


class MicroBatches:
    """Proposes these when the surrogate has nothing more; it leaves the last trials of a budget for them."""

    order, always = 22, False

    def propose(self, view: View) -> Proposal | None:
        """The first of them that there is time for."""
        return first_affordable(view, pending(view), Origin.search)


def pending(view: View) -> list[Configuration]:
    """The best configuration at about twice and half its micro batch, as far as these fit and were not timed.

    With the objective memory a larger one takes more of it. It is tried only where a drift of the machine's pace may
    have made the best seem fast enough, for the verification to fall back on.
    """
    best = view.best()
    if best is None or best.configuration.micro_batch_size is not None or best is view.baseline():
        return []
    timed = {one.micro_batch_size for one in best.curve} | {best.micro_batch_size}
    made = [
        best.configuration.at_micro_batch(size)
        for size in neighbours(best, view.spec.search.max_micro_batch_size)
        if size not in timed and (size < (best.micro_batch_size or 1) or not _needs_no_larger(view, best))
    ]
    return [one for one in made if one.key not in view.taken]


def _needs_no_larger(view: View, best: Measurement) -> bool:
    """Whether the least memory is asked for, and the best is far enough ahead of the baseline to stay small."""
    reference = view.baseline()
    return view.minimises_memory and (
        reference is None or counted_seconds(view.spec, best) * DRIFT <= counted_seconds(view.spec, reference)
    )


def neighbours(best: Measurement, limit: int | None) -> list[int]:
    """The micro batches nearest to twice and to half of the best one, larger first; none that is about as large.

    Where they count samples, they divide the effective batch.
    """
    configuration, micro = best.configuration, best.micro_batch_size or 1
    effective = configuration.effective_batch_size
    if configuration.levers["optimizer"] in WHOLE_STEP:
        return []
    counts_samples = configuration.levers["batching"] not in (*ROWS, *BUDGETED)
    sizes = [one for one in range(1, effective + 1) if not counts_samples or effective % one == 0]
    most = min(best.predicted_micro_batch or micro, limit or effective)
    larger = [one for one in sizes if TIMES_APART * micro <= one <= most]
    smaller = [one for one in sizes if TIMES_APART * one <= micro]
    found = []
    if larger:
        found.append(min(larger, key=lambda one: abs(math.log(one / (2 * micro)))))
    if smaller:
        found.append(min(smaller, key=lambda one: abs(math.log(2 * one / micro))))
    return found


PROPOSER = MicroBatches()
