"""The search: a pure function from (spec, hardware facts, history) to the next trials. No torch, no I/O, no clock.

Proposers (worker/plan/proposers) are asked in their order, the baseline's first. When none of them has a trial left or
the budget is spent, the finalists are verified in blocks together with the baseline, and the job ends.
"""

from __future__ import annotations

from service.contract.job import Method
from service.contract.states import JobPhase
from service.contract.task import PlanDecision, PlanInput, TrialRequest, VerifyRequest
from service.levers import as_fixed
from service.space import blocked, unavailable
from worker.plan.budget import GRACE_SHARE, Budget, searched_seconds
from worker.plan.ending import nothing_worked
from worker.plan.finalists import verification
from worker.plan.proposers import BadProposal, asked, proposers
from worker.plan.proposers.improvement import promising
from worker.plan.view import View

ENDED = "The search ended before its budget: nothing untried is expected to {} by much."


def plan(known: PlanInput) -> PlanDecision:
    """The next trials, the verification, or the end of the job. The same input gives the same decision.

    Raises BadProposal, which names the proposer, where one proposes a configuration that no trial may have.
    """
    methods: list[Method] = [one for one in known.spec.method if unavailable(known.facts, one) is None]
    notes = [reason for one in known.spec.method if (reason := unavailable(known.facts, one))]
    lacks = {name: reason for one in known.history for name, reason in one.measurement.lacks.items()}
    problem = blocked(known.spec, known.facts, lacks)
    if problem or not methods:
        return PlanDecision(finish=True, error=problem or "; ".join(notes))
    new: list[TrialRequest] = []
    if not known.verified_methods and not known.verify_open:
        _fill(known, methods, new, notes)
    views = [View(known, method) for method in methods]
    notes += _reused(views)
    planned = known.spec.search.trials
    if new or known.open_trials:
        phase = JobPhase.searching if known.history else JobPhase.baseline
        return PlanDecision(trials=tuple(new), phase=phase, planned_trials=planned, notes=tuple(notes))
    if known.verify_open:
        return PlanDecision(phase=JobPhase.verifying, notes=tuple(notes))
    if not known.verified_methods and Budget(known).allows(0) and not any(map(_has_more, views)):
        notes.append(ENDED.format("take less memory" if views[0].minimises_memory else "be faster"))
    request = verification([view for view in views if view.method not in known.verified_methods])
    if request is not None:
        notes += _late(known, request)
        return PlanDecision(verify=request, phase=JobPhase.verifying, planned_trials=planned, notes=tuple(notes))
    good = [one for view in views for one in view.good if as_fixed(known.spec, one.configuration)]
    error = None if good else nothing_worked(known.history)
    return PlanDecision(finish=True, phase=JobPhase.done, notes=tuple(notes), error=error)


def _has_more(view: View) -> bool:
    """Whether something is worth a trial, so that only the budget has ended the search; or nothing ran at all."""
    return not view.good or next(promising(view), None) is not None


def _late(known: PlanInput, request: VerifyRequest) -> list[str]:
    """A sentence when the verification is expected to end well after the job's minutes."""
    minutes = known.spec.search.minutes
    late = searched_seconds(known) + request.expected_seconds - minutes * 60
    if late <= minutes * 60 * GRACE_SHARE:
        return []
    return [
        f"search.minutes is {minutes:g}; the verification is expected to take about {request.expected_seconds:.0f} s, "
        f"so the job ends about {late:.0f} s later than asked."
    ]


def _reused(views: list[View]) -> list[str]:
    """A sentence about the earlier trials that tell this search what to try first, once all baselines have run."""
    if any(view.baseline() is None for view in views):
        return []
    same = sum(view.repeats(one) for view in views for one in view.earlier)
    alike = sum(len(view.earlier) for view in views) - same
    parts = [f"{same} of the same job"] * bool(same) + [f"{alike} of similar jobs"] * bool(alike)
    told = "Trials of earlier jobs on the same hardware told this search what to try first"
    return [f"{told}: {' and '.join(parts)}."] if parts else []


def _fill(known: PlanInput, methods: list[Method], new: list[TrialRequest], notes: list[str]) -> None:
    """Add trials to `new`, one for each idle worker: all methods' baselines, then trials of the method with fewest."""

    def ask(method: Method, always: bool) -> bool:
        view = View(known, method, new)
        for proposer in proposers():
            proposal = asked(proposer, view) if proposer.always is always else None
            if proposal is not None:
                new.append(view.request(proposal.configuration, proposal.origin))
                notes.extend(proposal.notes)
                return True
        return False

    for method in methods:
        ask(method, always=True)
    if known.spec.search.again:
        return  # nothing but that configuration and the baseline is measured
    budget, waiting = Budget(known), list(methods)
    while waiting and len(known.open_trials) + len(new) < known.workers and budget.allows(len(new)):
        views = [View(known, method, new) for method in waiting]
        if any(view.baseline_is_open() for view in views):
            return  # other trials' step 0 is compared with the baseline's, so they wait for it
        method = min(views, key=lambda view: view.begun()).method
        if not ask(method, always=False):
            waiting.remove(method)


__all__ = ["BadProposal", "plan"]
