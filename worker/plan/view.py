"""What proposers are given of a job: one of its methods, with all that was measured and all that is under way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from service.contract.configuration import Configuration
from service.contract.job import Method
from service.contract.measurement import Measurement, Outcome
from service.contract.objective import is_slower, least_disturbed, minimises_memory, ranked, run_seconds, score
from service.contract.states import Origin
from service.contract.task import EarlierTrial, PlanInput, TrialRequest
from service.levers import LEVERS, as_fixed
from service.space import space, without
from worker.plan.budget import Budget
from worker.plan.expected_memory import expected
from worker.plan.proof import precise
from worker.plan.space import effective_choices

ABOUT_AS_LARGE = 2.0  # earlier trials count if their model is at most so many times as large as this job's, or as small
# Times the best's score: how near to the best `near` is. It is chosen, not measured. If it is far larger, verifications
# spend their time on what cannot win. If it is far smaller, what was measured in a slow moment of a shared machine may
# never be verified.
WITHIN = 1.15
HALF = ("bfloat16", "float16")  # formats of a checkpoint's weights


class View:
    """One method of a job. A proposer changes nothing in it, so the same view gives the same proposal.

    `history` are the method's finished measurements in finish order; `good` those that may be recommended, best first;
    `earlier` trials of other jobs that tell something of it; `under_way` the trials of all methods that are queued or
    run, or were proposed a moment ago; `taken` the keys of all configurations tried or under way, `repeated` of those
    that were repeated, or are under way; `lacks` the choices that the job's model was found to lack, and why; `choices`
    the search space without these; `effectives` the effective batch sizes to try, in samples.
    """

    def __init__(self, known: PlanInput, method: Method, new: Sequence[TrialRequest] = ()) -> None:
        self.known, self.spec, self.facts, self.method = known, known.spec, known.facts, method
        self.budget = Budget(known)
        self.under_way = (*known.open_trials, *new)
        self._number, self._planned = known.next_number + len(new), len(new)
        measured = [one.measurement for one in known.history]
        self.history = [one for one in measured if one.configuration.method == method]
        self.minimises_memory = minimises_memory(known.spec)  # whether the least memory is asked for
        self.good = self._good()
        self.taken = {one.configuration.key for one in measured} | {one.configuration.key for one in self.under_way}
        repeats = (one.request for one in known.history if one.request.origin is Origin.repeat)
        self.repeated = {one.configuration.key for one in (*repeats, *self.under_way)}
        self.lacks = {name: reason for one in measured for name, reason in one.lacks.items()}
        self.choices = without(space(self.spec, self.facts, self.is_half()), self._lacks_that_count())
        self.earlier = self._earlier()
        self._datasets = {one.dataset.fingerprint for one in self.history if one.dataset}
        rows = next((one.dataset.rows for one in self.history if one.dataset), None)
        self.effectives = effective_choices(self.spec, rows)

    def _lacks_that_count(self) -> set[str]:
        """What the model lacks, but for choices that the job fixes and that do nothing where they are lacked."""
        fixed = {f"{name}={one}" for name, one in self.spec.search.fixed.items() if LEVERS[name].may_do_nothing}
        return self.lacks.keys() - fixed

    def is_half(self) -> bool:
        """Whether the checkpoint's weights have 16 bits, as a trial in the checkpoint's own format found."""
        own = {one.name for one in LEVERS["precision"].choices if one.options["weights"] == "auto"}
        return any(one.weights_dtype in HALF for one in self.history if one.configuration.levers["precision"] in own)

    def _good(self) -> list[Measurement]:
        """The successful measurements, best first, with the baseline."""
        found = least_disturbed(self.history)
        reference = self._baseline_of(found)
        return ranked(self.spec, found, {self.method: reference} if reference else {})

    def _earlier(self) -> list[EarlierTrial]:
        """Trials of earlier jobs that are like this one: of its method, and of a model of about its size.

        Those of a version of the catalogue with other levers are left out.
        """
        own = next((one.parameters for one in self.history if one.parameters), None)
        return [
            one
            for one in self.known.earlier
            if one.configuration.method == self.method
            and one.configuration.micro_batch_size is None
            and one.configuration.levers.keys() == LEVERS.keys()
            and own
            and one.parameters
            and 1 / ABOUT_AS_LARGE <= one.parameters / own <= ABOUT_AS_LARGE
        ]

    def repeats(self, earlier: EarlierTrial) -> bool:
        """Whether an earlier trial measured just what a trial of this job would: the same job on the same data."""
        return earlier.same_job and earlier.dataset in self._datasets

    def score(self, measurement: Measurement) -> float:
        """The cost of a measurement by the job's objective, such as the seconds of the user's run: less is better.

        Infinite where the objective rules the measurement out, as being slower than the baseline.
        """
        return math.inf if is_slower(self.spec, measurement, self.baseline()) else score(self.spec, measurement)

    def begun(self) -> int:
        """How many trials of the method have ended or are under way."""
        return len(self.history) + sum(one.configuration.method == self.method for one in self.under_way)

    def trials_left(self) -> float:
        """About how many more trials there is a budget for."""
        return self.budget.trials_left(self._planned)

    def baseline_request(self) -> TrialRequest | None:
        """The request of the method's baseline, or None when it has not been proposed yet.

        A request does not count if the model lacks one of its choices, or if it did not fit at the micro batch that it
        was given: another one takes its place.
        """
        held = (
            one.request
            for one in self.known.history
            if not is_lacked(one.request.configuration, one.measurement.lacks)
            and not was_given_too_much(one.measurement)
        )
        requests = (*held, *self.under_way)
        return next((one for one in requests if self._is_baseline(one)), None)

    def baseline_is_open(self) -> bool:
        """Whether the baseline is queued or under way."""
        return any(self._is_baseline(one) for one in self.under_way)

    def _is_baseline(self, request: TrialRequest) -> bool:
        return request.origin is Origin.baseline and request.configuration.method == self.method

    def baseline(self) -> Measurement | None:
        """The baseline's measurement, or None when it has not run to its end."""
        return self._baseline_of(self.good)

    def _baseline_of(self, measurements: list[Measurement]) -> Measurement | None:
        request = self.baseline_request()
        return next((one for one in measurements if request and one.configuration == request.configuration), None)

    def best(self) -> Measurement | None:
        """The best of the good measurements that has what the job fixes, which the baseline may not have."""
        return next((one for one in self.good if as_fixed(self.spec, one.configuration)), None)

    def near(self) -> list[Measurement]:
        """The good measurements, without the baseline's, that are close to the best of them, best first."""
        reference = self.baseline()
        others = [one for one in self.good if one is not reference]
        return [one for one in others if self.score(one) <= self.score(others[0]) * WITHIN]

    def request(self, configuration: Configuration, origin: Origin) -> TrialRequest:
        """The request for a trial of a configuration, with what earlier trials of the method tell about it."""
        reference, quick = self.baseline(), self.spec.search.verify == "quick"
        confirmed = any(one.configuration.micro_batch_size is None for one in self.good)
        # What takes little memory may be slower than the fastest, as long as it is not slower than the baseline.
        timed = [reference] if reference and self.minimises_memory else self.good
        return TrialRequest(
            configuration=configuration,
            origin=origin,
            number=self._number,
            confirm_largest=configuration.micro_batch_size is None and not (quick and confirmed),
            memory_line=expected(configuration, self.good, self.spec.dataset.max_length, self.is_half()),
            curve=not quick,
            passes=1 if quick else 2,  # one is enough where the verification times the best again
            seconds_limit=self.budget.trial_limit(configuration, origin),
            expected_seconds=self.budget.expected(configuration),
            first_micro_batch=self._first_micro_batch(configuration),
            best_seconds=min((one.timing.seconds for one in timed if one.timing), default=None),
            slowest_run_seconds=run_seconds(self.spec, reference) if reference and self.minimises_memory else None,
            reference_loss=reference.check_loss if reference else None,
            reference_grad_norm=reference.check_grad_norm if reference else None,
            reference_rounded=reference is not None and not precise(reference),
        )

    def _first_micro_batch(self, configuration: Configuration) -> int | None:
        """The micro batch of the best trial that arranges the same steps in the same way; None without one.

        A micro batch of another size may be a quarter faster, which would be mistaken for an effect of the levers. The
        baseline does not count, as its micro batch was given to it.
        """
        reference = self.baseline()
        alike = (
            one.micro_batch_size
            for one in self.good
            if one is not reference
            and one.configuration.levers["batching"] == configuration.levers["batching"]
            and one.configuration.effective_batch_size == configuration.effective_batch_size
        )
        return next(alike, None)


def is_lacked(configuration: Configuration, lacks: Mapping[str, str]) -> bool:
    """Whether the model lacks a choice of a configuration, by its `lacks` (as in a Measurement)."""
    return any(f"{name}={choice}" in lacks for name, choice in configuration.levers.items())


def was_given_too_much(failed: Measurement) -> bool:
    """Whether a trial did not fit at a micro batch that it was given, so that a smaller one may."""
    given = failed.configuration.micro_batch_size
    if failed.outcome is not Outcome.infeasible or given is None:
        return False
    sizes = [probe.micro_batch_size for probe in failed.probes if probe.peak_bytes is None]
    return min(sizes, default=given) > 1
