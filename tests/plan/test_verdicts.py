"""Verdicts: who held, by how much faster, in which order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from service.contract.job import JobSpec
from service.contract.measurement import Outcome, Soak
from service.contract.replay import Proof
from service.contract.task import VerifyRequest
from tests.factory import block, configuration, measured
from worker.plan.verdicts import judge

Spec = Callable[..., JobSpec]
BASE = measured(configuration(micro=8), 10.0)
FAST = measured(configuration(batching="sorted"), 5.0)
SLOW = measured(configuration(batching="packed"), 6.0)
REQUEST = VerifyRequest(method="lora", baseline=BASE, finalists=(FAST, SLOW), blocks=2, seconds_limit=60)


def test_speedup_is_the_median_of_the_blocks(spec: Spec) -> None:
    blocks = tuple(
        block(one, seconds, number)
        for number in range(3)
        for one, seconds in ((BASE, 10.0 + number), (FAST, 5.0), (SLOW, 6.0))
    )
    found = judge(spec(), REQUEST, blocks, {}, {})
    verdict = next(one for one in found.verdicts if one.key == FAST.configuration.key)
    assert verdict.stable and verdict.speedup == pytest.approx(
        (1.0 + 3 * 1000 / 64 * 11) / (1.0 + 3 * 1000 / 64 * 5)
    )  # of the run, load included
    assert verdict.speedup_low is not None and verdict.speedup_high is not None
    assert verdict.speedup_low < 2.0 and verdict.speedup_high > 2.4
    assert found.ranking == tuple(one.configuration.key for one in (FAST, SLOW, BASE)) and not found.tied
    base = next(one for one in found.verdicts if one.key == BASE.configuration.key)
    assert base.timing is not None and base.timing.seconds == 11.0


def test_a_candidate_that_fails_its_proof_is_not_stable(spec: Spec) -> None:
    blocks = (block(BASE, 10.0), block(FAST, 5.0), block(SLOW, 6.0))
    proofs: dict[str, Proof | str] = {FAST.configuration.key: Proof(reasons=("its weights moved 0.50 times as far",))}
    found = judge(spec(), REQUEST, blocks, {}, proofs)
    verdict = next(one for one in found.verdicts if one.key == FAST.configuration.key)
    assert not verdict.stable and verdict.reasons == ("its weights moved 0.50 times as far",)
    assert found.ranking[0] == SLOW.configuration.key
    found = judge(spec(), REQUEST, blocks, {}, {FAST.configuration.key: "its replay failed (crashed): no"})
    assert found.ranking[0] == SLOW.configuration.key


def test_a_candidate_slower_than_the_baseline_comes_after_it(spec: Spec) -> None:
    """Its trial was faster, but the blocks decide."""
    blocks = (block(BASE, 10.0), block(FAST, 11.0), block(SLOW, 12.0))
    assert judge(spec(), REQUEST, blocks, {}, {}).ranking[0] == BASE.configuration.key


def test_a_failed_block_or_soak_is_a_reason(spec: Spec) -> None:
    bad = block(FAST, 5.0, outcome=Outcome.unstable, reason="the loss of step 1 is nan")
    found = judge(
        spec(), REQUEST, (block(BASE, 10.0), bad, block(SLOW, 6.0)), {SLOW.configuration.key: "the soak failed"}, {}
    )
    reasons = {one.key: one.reasons for one in found.verdicts}
    assert "nan" in reasons[FAST.configuration.key][0] and reasons[SLOW.configuration.key] == ("the soak failed",)
    assert found.ranking == (BASE.configuration.key,)


def test_what_was_not_run_is_not_stable(spec: Spec) -> None:
    found = judge(spec(), REQUEST, (block(BASE, 10.0), block(FAST, 5.0)), {FAST.configuration.key: Soak(steps=3)}, {})
    verdicts = {one.key: one for one in found.verdicts}
    assert verdicts[SLOW.configuration.key].reasons == ("it was not run",)
    soak = verdicts[FAST.configuration.key].soak
    assert soak is not None and soak.steps == 3


def test_overlapping_intervals_are_a_tie(spec: Spec) -> None:
    blocks = (block(BASE, 10.0), block(FAST, 5.0), block(SLOW, 5.1))
    found = judge(spec(), REQUEST, blocks, {}, {})
    assert found.tied and "tied" in found.note


@pytest.mark.parametrize(
    ("simpler", "more", "first"),
    [
        ((5.0, 5.1, 5.0), (5.0, 4.95, 4.9), "simpler"),
        ((5.0, 5.0, 5.0), (4.8, 4.8, 4.8), "more"),
        ((5.0,), (4.8,), "more"),  # not surely, and too much to be nothing
        ((5.0,) * 12, (4.88,) * 12, "more"),  # little, and surely
    ],
)
def test_a_lever_that_does_not_surely_bring_a_gain_is_left_out(
    spec: Spec, simpler: tuple[float, ...], more: tuple[float, ...], first: str
) -> None:
    plain = measured(configuration(batching="sorted"), 5.0)
    made = {"simpler": plain, "more": measured(configuration(batching="sorted", padding="multiple-8"), 5.0)}
    request = REQUEST.model_copy(update={"finalists": tuple(made.values())})
    seconds = {"simpler": simpler, "more": more}
    blocks = tuple(block(made[name], seconds[name][at], at) for at in range(len(more)) for name in made)
    blocks += tuple(block(BASE, 10.0, at) for at in range(len(more)))
    assert judge(spec(), request, blocks, {}, {}).ranking[0] == made[first].configuration.key


def test_a_simpler_one_is_not_surely_slower_than_the_fastest_which_a_smaller_one_went_before(spec: Spec) -> None:
    """Within 1% of the fastest the one of fewer levers is first, and within 3% of that one that is simpler still."""
    more = {"padding": "multiple-8", "compile": "per-layer", "kernels": "liger"}
    fastest = measured(configuration("lora", 32, None, batching="sorted", **more), 5.0)
    fewer = measured(configuration(batching="sorted", padding="multiple-8"), 5.0)
    simplest = measured(configuration(batching="sorted"), 5.0)
    request = REQUEST.model_copy(update={"finalists": (fastest, fewer, simplest)})
    unsteady = (4.75, 5.4, 4.7, 5.35, 4.72, 5.38, 4.78, 5.3)
    made = ((fastest, (5.0,) * 8), (simplest, (5.18,) * 8), (fewer, unsteady))
    blocks = tuple(block(one, seconds[number], number) for number in range(8) for one, seconds in made)
    blocks += tuple(block(BASE, 10.0, number) for number in range(8))
    found = judge(spec(), request, blocks, {}, {})
    assert found.ranking[0] != simplest.configuration.key


def test_another_candidate_is_not_simpler(spec: Spec) -> None:
    """A tie with one that has other levers is for the measured order."""
    blocks = (block(BASE, 10.0), block(FAST, 5.0), block(SLOW, 5.1))
    assert judge(spec(), REQUEST, blocks, {}, {}).ranking[0] == FAST.configuration.key


def test_compile_time_counts_in_the_order(spec: Spec) -> None:
    compiled = FAST.model_copy(update={"compile_seconds": 1e6})
    request = REQUEST.model_copy(update={"finalists": (compiled, SLOW)})
    blocks = (block(BASE, 10.0), block(FAST, 5.0), block(SLOW, 6.0))
    assert judge(spec(), request, blocks, {}, {}).ranking[0] == SLOW.configuration.key
    throughput = spec(search={"objective": "throughput"})
    assert judge(throughput, request, blocks, {}, {}).ranking[0] == FAST.configuration.key


def test_blocks_that_others_disturbed_are_told(spec: Spec) -> None:
    quiet, loud = block(BASE, 10.0), block(FAST, 5.0)
    assert loud.timing is not None
    noisy = loud.timing.model_copy(update={"clean_share": 0.2, "largest_share_of_others": 0.5})
    found = judge(spec(), REQUEST, (quiet, loud.model_copy(update={"timing": noisy})), {}, {})
    assert "others used up to 50% of the device in 1 of 2 runs" in found.note
    assert "did not tell" not in found.note


def test_blocks_of_which_nobody_can_tell_are_not_called_clean(spec: Spec) -> None:
    quiet, silent = block(BASE, 10.0), block(FAST, 5.0)
    assert silent.timing is not None
    unknown = silent.timing.model_copy(update={"clean_share": None, "largest_share_of_others": None})
    found = judge(spec(), REQUEST, (quiet, silent.model_copy(update={"timing": unknown})), {}, {})
    assert "in 1 of 2 runs the device did not tell whether others used it" in found.note
    assert "others used up to" not in found.note


def test_another_effective_batch_learns_otherwise_and_is_not_simpler(spec: Spec) -> None:
    """Of equally fast ones the smaller batch is first where the job gives none; within 3% no other one is."""
    larger = measured(configuration(effective=64, batching="sorted"), 5.0)
    more = measured(configuration(batching="sorted", padding="multiple-8"), 5.0)
    request = REQUEST.model_copy(update={"finalists": (larger, more)})

    def first(job: JobSpec, took: float) -> str:
        blocks = (block(BASE, 10.0), block(larger, took), block(more, 5.0))
        return judge(job, request, blocks, {}, {}).ranking[0]

    free = spec(training={"effective_batch_size": None})
    assert first(free, 5.1) == more.configuration.key
    assert first(free, 4.98) == more.configuration.key, "the smaller batch"
    assert first(spec(training={"effective_batch_size": 32}), 4.98) == larger.configuration.key, "the fewer levers"
