"""For other aims than speed another configuration is named, and compiling says from which step on it pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from service.aims import break_even, instead
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Soak
from service.contract.states import Origin
from service.contract.task import VerifyRequest
from service.recommend import recommend
from tests.factory import block, configuration, measured, record
from worker.plan.verdicts import judge

Facts = Callable[..., HardwareFacts]
Spec = Callable[..., JobSpec]
COMPILED: dict[str, Any] = {"compile": "per-layer", "batching": "grouped"}


def test_each_aim_that_the_best_does_not_serve_has_its_fastest(spec: Spec) -> None:
    job = spec(search={"objective": "throughput"})
    best = measured(configuration(**COMPILED), 5.0, peak_bytes=300)
    eager = measured(configuration(batching="token-budget"), 8.0, peak_bytes=200)
    plain = measured(configuration(), 10.0, peak_bytes=250)
    slim = measured(configuration(checkpointing="every-2"), 12.0, peak_bytes=100)
    found = {one.aim: one for one in instead(job, best, [plain, best, slim, eager])}
    assert found["no-compile"].levers["batching"] == "token-budget" and found["no-compile"].speed == 5 / 8
    assert found["exact-numerics"].levers["batching"] == "token-budget", "compiled code rounds otherwise"
    assert found["plain-arguments"].levers == plain.configuration.levers
    assert found["least-memory"].peak_bytes == 100 and found["least-memory"].speed == 5 / 12


def test_what_serves_all_aims_has_nothing_instead(spec: Spec) -> None:
    best = measured(configuration(), 5.0, peak_bytes=100)
    assert instead(spec(), best, [best, measured(configuration(attention="eager"), 6.0, peak_bytes=100)]) == ()


def test_compiling_says_when_it_pays(spec: Spec) -> None:
    """A unit has two steps, so these take 2.5 and 4 s a step: 30 s of compiling are paid back after 20 steps."""
    best = measured(configuration(**COMPILED), 5.0, compile_seconds=30.0)
    eager = measured(configuration(batching="grouped"), 8.0)
    other = measured(configuration(effective=64), 2.0)
    said = break_even(spec(), best, [best, eager, other])
    assert said is not None and "pays from 20 optimizer steps on" in said and said.endswith("this run has 96.")
    assert break_even(spec(), eager, [best, eager]) is None and break_even(spec(), best, [best]) is None


def test_another_s_speed_is_beside_the_size_that_the_soak_left(spec: Spec, facts: Facts) -> None:
    """At the trial's micro batch the answer was twice as fast as the plain one; memory ran out at it later."""
    job = spec(search={"objective": "throughput", "verify": "quick"})
    base, fast = measured(configuration(micro=8), 10.0), measured(configuration(batching="sorted"), 5.0)
    request = VerifyRequest(method="lora", baseline=base, finalists=(fast,), blocks=1, seconds_limit=60)
    soak = Soak(micro_batch_size=4, steps=8, wanted_steps=8, peak_bytes=1 << 30)
    judged = judge(job, request, (block(base, 10.0), block(fast, 8.0)), {fast.configuration.key: soak}, {})
    best = recommend("j", job, facts(), (record(base, Origin.baseline), record(fast)), {"lora": judged})
    assert best and best.configuration.micro_batch_size == 4
    (plain,) = (one for one in best.instead if one.aim == "plain-arguments")
    assert plain.speed == pytest.approx(8 / 10)
