"""The figures beside a recommendation: by the blocks where it was verified, and as unsure as single trials are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec, Method
from service.contract.measurement import Soak, Verification
from service.contract.states import Origin
from service.contract.task import TrialRecord, VerifyRequest
from service.recommend import recommend
from tests.factory import block, configuration, history, measured, record, timing
from worker.plan.verdicts import judge

SOAK = Soak(steps=8, wanted_steps=8)
Facts = Callable[..., HardwareFacts]
Spec = Callable[..., JobSpec]


def test_the_figures_are_those_of_the_blocks_and_their_range_is_that_of_all(spec: Spec, facts: Facts) -> None:
    """The trial ran on a quiet machine, minutes before. A block has 12,800 tokens of 64 samples in two steps."""
    records = history(spec(), 4.0)
    base, one = (record.measurement for record in records)
    request = VerifyRequest(method="lora", baseline=base, finalists=(one,), blocks=2, seconds_limit=60)
    blocks = (block(base, 12.0), block(one, 5.0), block(base, 12.0, 1), block(one, 8.0, 1))
    judged = judge(spec(), request, blocks, {one.configuration.key: SOAK}, {})
    best = recommend("j", spec(), facts(), records, {"lora": judged})
    assert best and best.evidence.measurement == one
    found = best.evidence
    assert (found.tokens_per_second, found.samples_per_second, found.step_seconds) == (1600.0, 8.0, 4.0)
    assert found.tokens_per_second_low == pytest.approx(12_800 / (8.0 * 1.02))
    assert found.tokens_per_second_high == pytest.approx(12_800 / (5.0 * 0.98))
    assert found.run_seconds == pytest.approx(1.0 + 200_000 / 1600.0 * 3, rel=0.01), "three epochs, and to load"
    assert found.headroom_bytes == 1 << 30


def test_the_baseline_s_run_is_told_as_it_would_be_whatever_beside_training_counts(spec: Spec, facts: Facts) -> None:
    """By throughput, loading takes as long with the baseline as it does, not so many times as long as the answer's."""
    base = measured(configuration(micro=8), 10.0, load_seconds=100.0)
    one = measured(configuration(batching="sorted"), 5.0, load_seconds=40.0)
    for objective in ("wall-clock", "throughput"):
        job = spec(search={"objective": objective, "verify": "quick"})
        best = recommend("j", job, facts(), (record(base, Origin.baseline), record(one)), {})
        alone = recommend("j", job, facts(), (record(base, Origin.baseline),), {})
        assert best and alone
        assert best.evidence.baseline_run_seconds == pytest.approx(alone.evidence.run_seconds), objective
    assert best and best.evidence.speedup == pytest.approx(2.0), "the throughput's"
    request = VerifyRequest(method="lora", baseline=base, finalists=(one,), blocks=1, seconds_limit=60)
    judged = judge(job, request, (block(base, 12.0), block(one, 8.0)), {one.configuration.key: SOAK}, {})
    best = recommend("j", job, facts(), (record(base, Origin.baseline), record(one)), {"lora": judged})
    assert best and best.evidence.speedup == pytest.approx(1.5)
    assert best.evidence.baseline_run_seconds == pytest.approx(1.5 * (best.evidence.run_seconds - 40.0) + 100.0)


@pytest.mark.parametrize(("ours", "theirs"), [(0.0001, 0.0001), (0.2, 0.0001), (0.0001, 0.2)])
def test_single_trials_leave_open_what_processes_and_their_own_timings_do(
    spec: Spec, facts: Facts, ours: float, theirs: float
) -> None:
    """Two processes differ by 2%, as a standard deviation, however little each one's timings scatter."""
    base = measured(configuration(micro=8), timing=timing(10.0, theirs))
    one = measured(configuration(batching="sorted"), timing=timing(5.0, ours))
    best = recommend("j", spec(), facts(), (record(base, Origin.baseline), record(one)), {})
    assert best and best.evidence.speedup and best.evidence.speedup_low and best.evidence.speedup_high
    width = best.evidence.speedup / best.evidence.speedup_low
    assert width == pytest.approx(best.evidence.speedup_high / best.evidence.speedup)
    assert (
        width == pytest.approx(1.23, abs=0.01) if max(ours, theirs) > 0.1 else width == pytest.approx(1.04, abs=0.001)
    )


def test_it_tells_what_it_was_measured_on(spec: Spec, facts: Facts) -> None:
    """So that nobody takes it for another machine's."""
    machine = facts(name="NVIDIA H200", device="cuda", memory_bytes=141 << 30, driver="590.1", capability=(9, 0))
    best = recommend("j", spec(), machine, history(spec(), 5.0), {})
    assert best
    told = {name: best.environment[name] for name in ("device", "name", "memory_gib", "driver", "capability")}
    assert told == {
        "device": "cuda",
        "name": "NVIDIA H200",
        "memory_gib": 141.0,
        "driver": "590.1",
        "capability": (9, 0),
    }
    assert best.environment["fingerprint"] == machine.fingerprint


def test_of_methods_the_one_leads_that_is_faster_in_its_blocks(spec: Spec, facts: Facts) -> None:
    """A trial may have had the machine for itself; in the blocks a method's winner took turns with its baseline."""
    job, records, verified = spec(method=["lora", "qlora"]), list[TrialRecord](), dict[str, Verification | None]()
    cases: tuple[tuple[Method, float, float], ...] = (("lora", 5.0, 9.0), ("qlora", 6.0, 6.0))
    for method, tried, verifying in cases:
        base = measured(configuration(method, micro=8), 10.0)
        one = measured(configuration(method, batching="sorted"), tried)
        request = VerifyRequest(method=method, baseline=base, finalists=(one,), blocks=1, seconds_limit=60)
        soaks: dict[str, Soak | str] = {one.configuration.key: SOAK}
        verified[method] = judge(job, request, (block(base, 10.0), block(one, verifying)), soaks, {})
        records += [record(base, Origin.baseline), record(one)]
    best = recommend("j", job, facts(), tuple(records), verified)
    assert best and best.stability.stable is True and best.configuration.method == "qlora"
