"""The waterfall says what each lever of the best brings, the Pareto front which trials are worth choosing between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.comparisons import pareto, waterfall
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.states import Origin
from service.recommend import recommend
from tests.factory import configuration, failed, measured, record

Spec = Callable[..., JobSpec]
BEST: dict[str, Any] = {"batching": "grouped", "compile": "per-layer", "attention": "eager"}


def test_each_lever_taken_back_says_what_it_brings(spec: Spec) -> None:
    best, baseline = measured(configuration(**BEST), 5.0, load_seconds=0.0), measured(configuration(), 20.0)
    baseline = baseline.model_copy(update={"load_seconds": 0.0})
    without_batching = measured(configuration(**BEST | {"batching": "padded"}), 10.0, load_seconds=0.0)
    without_compile = failed(configuration(**BEST | {"compile": "off"}), reason="too large")
    trials = [record(one) for one in (baseline, best, without_batching, without_compile)]
    found = waterfall(spec(), best, baseline, trials)
    by_lever = {one.lever: one for one in found.contributions}
    assert found.speedup == pytest.approx(4.0) and found.together is None
    assert found.contributions[0].lever == "batching" and by_lever["batching"].factor == pytest.approx(2.0)
    assert (by_lever["batching"].low or 0) < 2.0 < (by_lever["batching"].high or 0)
    assert (by_lever["batching"].baseline, by_lever["batching"].choice) == ("padded", "grouped")
    assert by_lever["compile"].factor is None and "too large" in by_lever["compile"].reason
    assert "not measured" in by_lever["attention"].reason


def test_the_recommendation_holds_what_each_lever_brings(spec: Spec, facts: Callable[..., HardwareFacts]) -> None:
    """So that an export can say what it costs that it cannot say a lever."""
    best, baseline = measured(configuration(micro=8, **BEST), 5.0), measured(configuration(micro=8), 20.0)
    without = measured(configuration(**BEST | {"batching": "padded"}), 10.0)
    trials = (record(baseline, Origin.baseline), record(best), record(without))
    found = recommend("job1", spec(), facts(), trials, {})
    assert found is not None
    assert found.contributions == waterfall(spec(), best, baseline, trials).contributions
    assert found.contributions[0].lever == "batching" and found.contributions[0].factor is not None


def test_what_levers_do_together_is_left_over(spec: Spec) -> None:
    levers: dict[str, Any] = {"batching": "grouped", "attention": "eager"}
    best, baseline = measured(configuration(**levers), 5.0), measured(configuration(), 20.0)
    others = [measured(configuration(batching="grouped"), 10.0), measured(configuration(attention="eager"), 5.0)]
    trials = [record(one) for one in (baseline, best, *others)]
    found = waterfall(spec(search={"objective": "throughput"}), best, baseline, trials)
    assert found.together == pytest.approx(2.0), "2x and 1x by themselves, 4x together"


def test_without_a_baseline_there_is_nothing_to_take_back_to(spec: Spec) -> None:
    best = measured(configuration(**BEST), 5.0)
    found = waterfall(spec(), best, None, [record(best)])
    assert found.speedup is None and found.contributions == () and found.together is None


def test_a_given_micro_batch_does_not_hide_what_was_taken_back(spec: Spec) -> None:
    """Those without a lever looked for a micro batch, as the best's twin did, so they are compared with that."""
    best = measured(configuration(micro=16, batching="grouped"), 4.0, load_seconds=0.0)
    twin = measured(configuration(batching="grouped"), 5.0, load_seconds=0.0)
    baseline = measured(configuration(micro=8), 20.0, load_seconds=0.0)
    without = measured(configuration(), 10.0, load_seconds=0.0)
    found = waterfall(spec(), best, baseline, [record(one) for one in (baseline, twin, without, best)])
    assert [one.factor for one in found.contributions] == [pytest.approx(2.0)]


def test_levers_that_only_go_together_are_said(spec: Spec) -> None:
    """Side by side needs an attention that is told where samples end, so that this one cannot go alone."""
    levers: dict[str, Any] = {"batching": "padding-free", "attention": "varlen"}
    best, baseline = measured(configuration(**levers), 5.0), measured(configuration(), 20.0)
    without = measured(configuration(attention="varlen"), 10.0)
    found = waterfall(spec(), best, baseline, [record(one) for one in (best, baseline, without)])
    reasons = {one.lever: one.reason for one in found.contributions}
    assert "cannot be taken back alone" in reasons["attention"] and reasons["batching"] == ""
    assert found.together is None


def test_the_front_holds_what_nothing_beats() -> None:
    fast = measured(configuration(batching="grouped"), 5.0, peak_bytes=300)
    slim = measured(configuration(checkpointing="full"), 9.0, peak_bytes=100)
    beaten = measured(configuration(), 10.0, peak_bytes=100)
    trials = [record(beaten, Origin.baseline, 1), record(slim, number=2), record(fast, number=3)]
    trials.append(record(failed(configuration(compile="whole")), number=4))
    assert [one.trial for one in pareto(trials).points] == [3, 2]


def test_the_routes_answer_before_and_after_there_is_something_to_say(api: TestClient) -> None:
    assert api.get("/v1/jobs/none/waterfall").status_code == 404 == api.get("/v1/jobs/none/pareto").status_code
