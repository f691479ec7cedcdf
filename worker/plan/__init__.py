"""The search: a pure function from (spec, hardware facts, history) to the next trials. No torch, no I/O, no clock.

Baseline first, then known-good recipes, single changes around the best, then Optuna; finalists are verified in
blocks with the baseline; then the end.
"""

from __future__ import annotations

from service.contract.configuration import Configuration
from service.contract.job import Method
from service.contract.measurement import Measurement, Outcome
from service.contract.objective import ranked, score
from service.contract.states import JobPhase, Origin
from service.contract.task import PlanDecision, PlanInput, TrialRequest, VerifyRequest
from worker.plan.baseline import baseline, precise, reference_of
from worker.plan.budget import Budget
from worker.plan.ending import nothing_worked
from worker.plan.expected_memory import expected
from worker.plan.recipes import changes, recipes
from worker.plan.space import blocked, effective_choices, inside, space, unavailable, without
from worker.plan.study import ask
from worker.plan.verdicts import LEAST_CLEAN

FINALISTS = 3
NEAREST = {"quick": 1, "full": 2}  # of them by their trials alone
RESERVES = 3
WITHIN = 1.15
DRIFT = 1.25  # of a shared machine's pace between an early and a late trial: as seen in a demo, 2026-11-22
MOST_UNAFFORDABLE = 8


class _Plan:
    """One planning: the input, looked at in the ways the steps need."""

    def __init__(self, known: PlanInput) -> None:
        self.known, self.spec, self.facts = known, known.spec, known.facts
        self.methods = [method for method in known.spec.method if unavailable(known.facts, method) is None]
        lacks = {name for one in known.history for name in one.measurement.lacks}
        self.choices = without(space(known.spec, known.facts), lacks)
        self.open = list(known.open_trials)
        self.budget = Budget(known)
        self.new: list[TrialRequest] = []
        self.notes = [reason for method in known.spec.method if (reason := unavailable(known.facts, method))]

    def of(self, method: Method) -> list[Measurement]:
        """Finished measurements of a method, in finish order."""
        return [one.measurement for one in self.known.history if one.measurement.configuration.method == method]

    def good(self, method: Method) -> list[Measurement]:
        """Those that may be recommended, best first, the baseline among them; of a repeated one the cleaner."""
        found: dict[str, Measurement] = {}
        for one in self.of(method):
            key, share = one.configuration.key, one.timing.clean_share if one.timing else 0.0
            before = found[key].timing if key in found else None
            if one.outcome is Outcome.ok and (before is None or share >= before.clean_share):
                found[key] = one
        return ranked(self.spec, list(found.values()))

    def baseline_request(self, method: Method) -> TrialRequest | None:
        """The baseline's request, when it has been made already."""
        requests = [one.request for one in self.known.history] + self.open + self.new
        found = [one for one in requests if one.origin is Origin.baseline and one.configuration.method == method]
        return found[0] if found else None

    def baseline_measurement(self, method: Method) -> Measurement | None:
        """The baseline's measurement, when it ran to its end."""
        request = self.baseline_request(method)
        return next((one for one in self.good(method) if request and one.configuration == request.configuration), None)

    def taken(self) -> set[str]:
        """Keys of all configurations tried or under way."""
        done = {one.measurement.configuration.key for one in self.known.history}
        return done | {one.configuration.key for one in self.open + self.new}

    def request(self, configuration: Configuration, origin: Origin) -> TrialRequest:
        """A trial with what earlier ones of its method learnt."""
        reference = self.baseline_measurement(configuration.method)
        good = self.good(configuration.method)
        quick = self.spec.search.verify == "quick"
        confirmed = any(one.configuration.micro_batch_size is None for one in good)
        return TrialRequest(
            configuration=configuration,
            origin=origin,
            number=self.known.next_number + len(self.new),
            confirm_largest=configuration.micro_batch_size is None and not (quick and confirmed),
            memory_line=expected(configuration, good, self.spec.dataset.max_length),
            curve=not quick,
            passes=1 if quick else 2,  # what matters is timed again in blocks
            seconds_limit=self.budget.trial_limit(configuration, origin),
            best_seconds=min((one.timing.seconds for one in good if one.timing), default=None),
            reference_loss=reference.check_loss if reference else None,
            reference_grad_norm=reference.check_grad_norm if reference else None,
            reference_rounded=reference is not None and not precise(reference),
        )

    def next_trial(self, method: Method) -> TrialRequest | None:
        """The method's next trial, or None when there is nothing left to try."""
        rows = next((one.dataset.rows for one in self.of(method) if one.dataset), None)
        effectives = effective_choices(self.spec, rows)
        taken = self.taken()
        default = effectives[min(1, len(effectives) - 1)]
        for configuration in recipes(self.spec, self.facts, method, self.choices, default):
            if configuration.key not in taken:
                return self.request(configuration, Origin.recipe)
        good = [one for one in self.good(method) if inside(one.configuration, self.choices, self.spec.task)]
        if good:
            for configuration in changes(self.spec, good[0], self.choices):
                if configuration.key not in taken and self.budget.affords(configuration):
                    return self.request(configuration, Origin.recipe)
        under_way = [one.configuration for one in self.open + self.new if one.configuration.method == method]
        for _ in range(MOST_UNAFFORDABLE):
            found = ask(self.spec, method, self.choices, effectives, self.of(method), under_way, taken, self._score)
            if found is None:
                break
            if self.budget.affords(found):
                return self.request(found, Origin.search)
            taken.add(found.key)  # compiled, and too late for that: others may still fit
        return self.repeat(method)

    def repeat(self, method: Method) -> TrialRequest | None:
        """A trial near the best that others disturbed, once more."""
        repeated = {one.request.configuration.key for one in self.known.history if one.request.origin is Origin.repeat}
        repeated |= {one.configuration.key for one in self.open + self.new}
        for one in self.near(method):
            if one.timing and one.timing.clean_share < LEAST_CLEAN and one.configuration.key not in repeated:
                return self.request(one.configuration, Origin.repeat)
        return None

    def near(self, method: Method) -> list[Measurement]:
        """All but the baseline that are close to the best, best first."""
        reference = self.baseline_measurement(method)
        others = [one for one in self.good(method) if one is not reference]
        return [one for one in others if self._score(one) <= self._score(others[0]) * WITHIN]

    def finalists(self, method: Method) -> list[Measurement]:
        """The nearest to the best, then the best of other batchings, then whoever else is near.

        Changes are tried around one configuration, minutes after the recipes: how batchings compare is what the
        machine's pace blurs most, and what only blocks in turns can tell.
        """
        near, reference = self.near(method), self.baseline_measurement(method)
        found = near[: NEAREST[self.spec.search.verify]]
        for one in self.good(method) if found else ():
            known = {other.configuration.levers["batching"] for other in found}
            drifted = one is not reference and self._score(one) <= self._score(found[0]) * DRIFT
            if drifted and one.configuration.levers["batching"] not in known:
                found.append(one)
        found += [one for one in near if one not in found]
        return sorted(found[:FINALISTS], key=self._score)

    def _score(self, measurement: Measurement) -> float:
        return score(self.spec, measurement)

    def fill(self) -> None:
        """As many trials as there are workers: baselines first, then the method with the fewest."""
        for method in self.methods:
            if self.baseline_request(method) is None:
                configuration, notes = baseline(self.spec, method)
                self.notes += notes
                self.new.append(self.request(configuration, Origin.baseline))
        waiting = list(self.methods)
        while waiting and len(self.open) + len(self.new) < self.known.workers and self.budget.allows(len(self.new)):
            if any(self.baseline_is_open(method) for method in waiting):
                return  # its step 0 is what all others are compared with
            method = min(waiting, key=lambda one: len(self.of(one)))
            request = self.next_trial(method)
            if request is None:
                waiting.remove(method)
            else:
                self.new.append(request)

    def baseline_is_open(self, method: Method) -> bool:
        """Whether the baseline is queued or under way."""
        return any(one.origin is Origin.baseline and one.configuration.method == method for one in self.open + self.new)

    def verify(self) -> VerifyRequest | None:
        """The next method's verification: finalists close to its best, with their baseline."""
        for method in self.methods:
            if method in self.known.verified_methods:
                continue
            finalists = self.finalists(method)
            if not finalists:
                continue
            baseline = self.baseline_measurement(method)
            others = [one for one in self.good(method) if one != baseline and one not in finalists]
            return VerifyRequest(
                method=method,
                baseline=baseline,
                finalists=tuple(finalists),
                reserves=tuple(others[:RESERVES]),
                reference=reference_of(baseline) if baseline else None,
                blocks=4 if self.spec.search.verify == "quick" else 5,
                seconds_limit=self.budget.verify_seconds(len(self.methods) - len(self.known.verified_methods)),
            )
        return None


def plan(known: PlanInput) -> PlanDecision:
    """What to do next. Same input, same answer."""
    work = _Plan(known)
    problem = blocked(known.spec, known.facts)
    if problem or not work.methods:
        return PlanDecision(finish=True, error=problem or "; ".join(work.notes))
    if not known.verified_methods and not known.verify_open:
        work.fill()
    planned = known.spec.search.trials
    notes = tuple(work.notes)
    if work.new or work.open:
        phase = JobPhase.searching if known.history else JobPhase.baseline
        return PlanDecision(trials=tuple(work.new), phase=phase, planned_trials=planned, notes=notes)
    if known.verify_open:
        return PlanDecision(phase=JobPhase.verifying, notes=notes)
    request = work.verify()
    if request is not None:
        return PlanDecision(verify=request, phase=JobPhase.verifying, planned_trials=planned, notes=notes)
    good = any(work.good(method) for method in work.methods)
    return PlanDecision(
        finish=True, phase=JobPhase.done, notes=notes, error=None if good else nothing_worked(known.history)
    )


__all__ = ["plan"]
