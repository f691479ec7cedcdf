"""What a trial times, how often, and what it says of it. Sizes take given seconds; nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from service.contract.job import JobSpec
from service.contract.states import Origin
from service.contract.task import TrialRequest
from tests.factory import configuration
from tests.factory import timing as timing_of
from worker.child import curve
from worker.child.curve import Curve
from worker.child.size_search import Found

SECONDS = {1: 9.0, 2: 7.0, 4: 6.0, 8: 5.0}
FOUND = Found(8, 8, "memory")


class Trial:
    """A curve whose unit takes SECONDS, the sizes that it times, and how often it times the best one in all."""

    def __init__(self, spec: JobSpec, patch: pytest.MonkeyPatch, micro: int | None = None, **asked: Any) -> None:
        values: dict[str, Any] = {"origin": Origin.search, "number": 2, "curve": False, "passes": 1} | asked
        request = TrialRequest(configuration=configuration(micro=micro), **values)
        self.device = SimpleNamespace(gains_from_large_batches=True, runs_ahead=False)
        self.device.empty_cache, self.device.used = (lambda: None), (lambda: 0)
        facts = SimpleNamespace(tokens=12_800, rows=64, longest=512)
        bundle: Any = SimpleNamespace(spec=spec, device=self.device, configuration=request.configuration)
        bundle.data, bundle.recipe = SimpleNamespace(facts=facts), SimpleNamespace(rows_are_packed=False)
        self.curve = Curve(bundle, [], request, lambda _: None, 100.0)
        self.seconds = dict(SECONDS)
        self.sizes: list[int] = []
        self.again: list[tuple[int, int]] = []
        self.told: dict[str, Any] = {"passes": 1, "timed_share": 1.0}
        self.promising: list[int | None] = [None]
        self.ends_at: int | None = None
        patch.setattr(curve, "candidates", lambda _, largest: [size for size in SECONDS if size <= largest])
        patch.setattr(curve, "time_unit", lambda unit, passes, **_: self.again.append((unit.micro, passes)))
        patch.setattr(self.curve, "_promising", lambda: self.promising.pop(0))
        patch.setattr(self.curve, "_time", self._time)

    def run(self) -> int:
        """The micro batch that is recommended."""
        return self.curve.run(FOUND).micro

    def _time(self, size: int) -> bool:
        self.sizes.append(size)
        if size == self.ends_at:
            return False
        told = {"micro": size, "bundle": self.curve._bundle, "losses": [float(size)], "grad_norms": [1.0]}
        made = SimpleNamespace(**(told | self.told))
        made.timing, made.first_calls = (lambda: timing_of(self.seconds[size], micro=size)), (lambda: 0.0)
        self.curve._timed[size] = made  # type: ignore[assignment]
        return True


Make = Callable[..., Trial]


@pytest.fixture
def trial(spec: Callable[..., JobSpec], monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a trial; `objective` is the job's, `micro` a micro batch that it is given, others are of its request."""

    def make(objective: str = "wall-clock", micro: int | None = None, **asked: Any) -> Trial:
        job = spec(training={"epochs": 1}, search={"objective": objective, "verify": "quick"})
        return Trial(job, monkeypatch, micro, **asked)

    return make


def test_a_quick_search_times_the_largest_and_at_most_two_that_promise_more(trial: Make) -> None:
    made = trial()
    made.promising = [2, 4, 1]
    assert made.run() == 8 and made.sizes == [8, 2, 4] and made.again == [], "the verification times the best again"
    assert made.curve.losses == (8.0,), "of the size that was timed first, from the first weights on"
    made = trial()
    made.promising, made.ends_at = [2, 4, 1], 2
    assert made.run() == 8 and made.sizes == [8, 2], "the time is up"


def test_a_full_search_times_the_curve_each_size_once(trial: Make) -> None:
    made = trial(curve=True, passes=2)
    assert made.run() == 8 and made.sizes == [8, 4] and made.again == [(8, 2)]
    assert [one.micro_batch_size for one in made.curve.timings()] == [4, 8]
    made = trial(curve=True)
    made.promising, made.ends_at = [2], 4
    assert made.run() == 8 and made.sizes == [8, 4], "the time is up before anything else is tried"


@pytest.mark.parametrize(("seconds", "size"), [(5.04, 4), (5.06, 8)])
def test_the_smallest_size_within_a_percent_of_the_fastest_is_recommended(
    trial: Make, seconds: float, size: int
) -> None:
    """It leaves more memory free, and gains as much as can be told."""
    made = trial(curve=True)
    made.seconds[4] = seconds
    assert made.run() == size


def test_a_given_micro_batch_is_the_only_one_that_is_timed(trial: Make) -> None:
    made = trial(micro=4, curve=True)
    assert made.run() == 4 and made.sizes == [4] and made.curve.notes == []


def test_a_cpu_begins_with_the_size_of_the_best_trial_that_is_alike(trial: Make) -> None:
    made = trial(first_micro_batch=4)
    made.device.gains_from_large_batches = False
    assert made.run() == 4 and made.sizes == [4]


def test_for_memory_only_the_baseline_has_the_fastest_size(trial: Make) -> None:
    """It is what its user would run, so that others are compared with that."""
    asked: dict[str, Any] = {"slowest_run_seconds": 100.0}
    assert trial("memory", origin=Origin.baseline, **asked).run() == 8
    assert trial("memory", **asked).run() == 1


def test_a_trial_that_is_clearly_slower_is_not_timed_again_and_says_so(trial: Make) -> None:
    made = trial(passes=2, best_seconds=3.9)
    assert made.run() == 8 and made.again == []
    assert made.curve.notes == ["Clearly slower than the best so far, so it was timed once only."]
    made = trial("memory", passes=2, best_seconds=3.9)
    made.run()
    assert made.curve.notes == ["Clearly slower than the baseline, so it was timed once only."]
    made = trial(passes=2, best_seconds=4.1)
    assert made.run() == 8 and made.again == [(8, 2)] and made.curve.notes == []


def test_a_trial_that_was_given_up_says_after_how_much_of_the_unit(trial: Make) -> None:
    made = trial(passes=2, best_seconds=3.0)
    made.told = {"passes": 0, "timed_share": 0.4}
    made.run()
    assert made.curve.notes == [
        "Clearly slower than the best so far, so it was timed until 40% of the work unit told that."
    ]


def test_a_unit_that_was_timed_in_part_is_said_to_be(trial: Make) -> None:
    made = trial()
    made.told = {"passes": 1, "timed_share": 0.4}
    made.run()
    assert made.curve.notes == ["40% of the work unit was timed, which tells what the rest takes."]


def test_a_fifth_of_the_trial_s_time_is_kept_for_what_follows(trial: Make) -> None:
    """Or the worker would end the child before it has told what it measured."""
    assert trial(seconds_limit=50.0).curve._deadline == 140.0
