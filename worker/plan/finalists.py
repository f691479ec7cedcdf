"""Which configurations are verified, and with how much time."""

from __future__ import annotations

import math

from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import DRIFT, NORMAL, Measurement
from service.contract.task import VerifyRequest
from service.levers import taken_back
from worker.plan.budget import verification_seconds, worth_verifying
from worker.plan.view import View

# How many finalists are chosen by their trials' speed alone (docs/decisions/0013).
NEAREST = {"quick": 1, "standard": 2, "strict": 2}
BLOCKS = {"quick": 8, "standard": 8, "strict": 12}  # at most: a verification ends when it is settled
# A configuration that lacks one of the best one's levers is verified, too, if its trial was at most ABOUT times as
# slow, or if the trials' intervals leave that open; the best one at another micro batch, if it was at most CLOSE times
# as slow. Both are chosen, not measured; ABOUT is as near as a verification calls a tie (TIED_WITHIN in ratios.py). If
# they are far larger, slower candidates take the place and the time of finalists that might win. If they are far
# smaller, a lever that brings nothing stays in the answer, and so does a micro batch that was best by chance.
ABOUT = 1.02
CLOSE = 1.1
RESERVES = 3  # candidates that are verified if no finalist is stable


def finalists(view: View) -> list[Measurement]:
    """The configurations to verify, best first.

    These are the fastest ones, with one that is simpler and one at another micro batch if they are about as fast; then
    the fastest of other batchings; then others that are near the fastest.

    Trials are minutes apart, and a shared machine changes its pace in that time. So trials tell little about which
    batching is faster; blocks in which candidates take turns do. Of memory trials tell enough, so that with the
    objective memory other batchings are not looked for.
    """
    near, reference = view.near(), view.baseline()
    found = near[: NEAREST[view.spec.search.verify]]
    beside = [*_simpler(view, found[0]), *_other_sizes(view, found[0])] if found else []
    found += [one for one in beside if one not in found]
    for one in view.good if found and not view.minimises_memory else ():
        known = {other.configuration.levers["batching"] for other in found}
        drifted = one is not reference and view.score(one) <= view.score(found[0]) * DRIFT
        if drifted and one.configuration.levers["batching"] not in known:
            found.append(one)
    found += [one for one in near if one not in found]
    return sorted(worth_verifying(view.spec, view.facts, [reference] if reference else [], found), key=view.score)


def _simpler(view: View, best: Measurement) -> list[Measurement]:
    """The fastest of those that are the best without one of its levers and about as fast, or none.

    Blocks tell whether the lever brings anything; if not, the simpler one is recommended.
    """
    keys = _keys_without(view, best)

    def is_about_as_fast(one: Measurement) -> bool:
        unsure = math.hypot(*(made.timing.log_error for made in (one, best) if made.timing))
        most = min(max(ABOUT, math.exp(NORMAL * unsure)), CLOSE)
        return view.score(one) <= view.score(best) * most

    return [one for one in view.near() if one.configuration.key in keys and is_about_as_fast(one)][:1]


def _other_sizes(view: View, best: Measurement) -> list[Measurement]:
    """The fastest of those that are the best at another micro batch and about as fast, or none."""
    most = view.score(best) * CLOSE
    return [
        one
        for one in view.near()
        if one is not best
        and one.configuration.levers == best.configuration.levers
        and one.configuration.effective_batch_size == best.configuration.effective_batch_size
        and view.score(one) <= most
    ][:1]


def _taken_back(view: View, finalists: list[Measurement]) -> list[Measurement]:
    """The trials that are a finalist with one lever taken back, to tell what that saves; none in a quick search."""
    if view.spec.search.verify == "quick" or view.minimises_memory:
        return []
    keys, baseline = set().union(*(_keys_without(view, one) for one in finalists)), view.baseline()
    return [one for one in view.good if one.configuration.key in keys and one not in finalists and one is not baseline]


def _keys_without(view: View, best: Measurement) -> set[str]:
    """The keys of the configurations that are `best` with one lever as in the baseline; none without a baseline."""
    reference = view.baseline_request()
    made = taken_back(view.spec, best.configuration, reference.configuration) if reference else {}
    return {one.key for one in made.values()}


def affordable(
    spec: JobSpec, facts: HardwareFacts, best: list[Measurement], always: list[Measurement], seconds: float
) -> list[Measurement]:
    """As many of the best as can be verified in that time, beside those that are verified `always`; one at least."""
    while len(best) > 1 and verification_seconds(spec, facts, [*always, *best]) > seconds:
        best = best[:-1]
    return best


def verification(left: list[View]) -> VerifyRequest | None:
    """The next verification's request: of the first method with finalists; None when no method has any.

    `left` are the methods that are not verified yet.
    """
    for view in left:
        best, baseline = finalists(view), view.baseline()
        if not best:
            continue
        seconds = view.budget.verify_seconds(len(left))
        always = [baseline] if baseline else []
        best = affordable(view.spec, view.facts, best, always, seconds)
        others = [one for one in view.good if one != baseline and one not in best]
        return VerifyRequest(
            method=view.method,
            baseline=baseline,
            finalists=tuple(best),
            reserves=tuple(others[:RESERVES]),
            taken_back=tuple(_taken_back(view, best)),
            blocks=BLOCKS[view.spec.search.verify],
            seconds_limit=seconds,
            expected_seconds=verification_seconds(view.spec, view.facts, [*always, *best]),
        )
    return None
