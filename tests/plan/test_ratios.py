"""Ratios of candidates: what slows both drops out, and the interval says how sure they are."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest

from service.contract.job import JobSpec
from service.contract.measurement import NORMAL, PROCESS_SPREAD, Block, Outcome, Slice
from service.contract.objective import counted_seconds, seconds_beside
from service.contract.task import VerifyRequest
from tests.factory import block, configuration, measured
from worker.plan.ratios import (
    by_blocks,
    certainly_slower,
    chained,
    is_sure,
    process_pairs,
    ratio,
    relative_costs,
    settled,
    standard_error,
    weighted_median,
)

Spec = Callable[..., JobSpec]
BASE, FAST = measured(configuration(micro=8), 10.0), measured(configuration(batching="sorted"), 5.0)
NEAR = measured(configuration(batching="grouped"), 5.02)


def sliced(one: Block, slow: list[float], seed: int, noise: float = 0.01) -> Block:
    """The block in turns: in each, the machine is so many times slower, and the candidate's own noise comes on top."""
    rng = random.Random(seed)
    assert one.timing is not None
    expected = one.timing.seconds / len(slow)
    slices = [
        Slice(turn=turn, seconds=expected * pace * rng.gauss(1, noise), expected=expected)
        for turn, pace in enumerate(slow)
    ]
    return one.model_copy(update={"slices": tuple(slices)})


def test_what_slows_both_candidates_drops_out() -> None:
    bursts = [1.0, 1.0, 3.0, 1.0, 2.0, 1.0, 1.0, 2.5]
    ours, theirs = sliced(block(FAST, 5.0), bursts, 1), sliced(block(BASE, 10.0), bursts, 2)
    assert standard_error(ours, theirs) < 0.01
    assert standard_error(ours, sliced(block(BASE, 10.0), [1.0] * 8, 2)) > 0.1, "a burst that only one of them had"


def test_a_block_that_others_disturbed_says_little_beside_a_quiet_one(spec: Spec) -> None:
    """The second block's turns differ by a fifth, and its candidate looks 30% faster than it is."""
    rng = random.Random(3)
    uneven = [1.0 + 0.2 * rng.random() for _ in range(8)]
    quiet = sliced(block(BASE, 10.0), [1.0] * 8, 1), sliced(block(FAST, 5.0), [1.0] * 8, 2)
    disturbed = sliced(block(BASE, 13.0, 1), uneven, 3, 0.3), sliced(block(FAST, 5.0, 1), [1.0] * 8, 4)
    for share in (0.3, None):
        told = [shared(one, share) for one in disturbed]
        found = ratio(spec(search={"objective": "throughput"}), (*quiet, *told), FAST, BASE)
        assert found is not None and found[0] == pytest.approx(2.0, rel=0.03) and found[1] < 2.0 < found[2]


def shared(one: Block, clean_share: float | None) -> Block:
    """The block, of whose timings such a share is known to be clean."""
    assert one.timing is not None
    return one.model_copy(update={"timing": one.timing.model_copy(update={"clean_share": clean_share})})


def test_blocks_in_which_a_candidate_stalls_count_like_those_in_which_it_does_not(spec: Spec) -> None:
    """Nobody disturbs it, so that its stalls are its own: in two of five blocks a turn takes ten times as long."""
    blocks: list[Block] = []
    for number, stalls in enumerate((False, True, False, True, True)):
        turns = [1.0] * 7 + [10.0 if stalls else 1.0]
        blocks += [sliced(block(BASE, 10.0, number), [1.0] * 8, number)]
        blocks += [sliced(block(FAST, 5.0 * sum(turns) / 8, number), turns, 10 + number)]
    found = ratio(spec(search={"objective": "throughput"}), tuple(blocks), FAST, BASE)
    assert found is not None and found[0] == pytest.approx(10 / (5 * 17 / 8), rel=0.01)


def test_what_a_run_takes_beside_its_steps_is_unsure_however_many_blocks_there_are(spec: Spec) -> None:
    """A trial sees loading and compiling once."""
    blocks = tuple(one for at in range(8) for one in (block(BASE, 10.0, at), block(FAST, 5.0, at)))
    compiles = FAST.model_copy(update={"compile_seconds": 300.0})
    for objective, is_wide in (("throughput", False), ("wall-clock", True)):
        job = spec(search={"objective": objective})
        whole, of_blocks = ratio(job, blocks, compiles, BASE), by_blocks(job, blocks, compiles, BASE)
        assert whole is not None and of_blocks is not None and whole[0] == of_blocks[0]
        width = math.log(whole[2] / whole[0])
        share = 0.0 if objective == "throughput" else seconds_beside(job, compiles) / counted_seconds(job, compiles)
        assert (share > 0.2) is is_wide
        assert width >= math.hypot(math.log(of_blocks[2] / of_blocks[0]), 0.19 * share)
        assert (width > math.log(of_blocks[2] / of_blocks[0]) * 1.2) is is_wide


def test_the_weighted_median_is_the_median_where_all_values_count_the_same() -> None:
    rng = random.Random(0)
    for count in range(1, 7):
        values = [rng.random() for _ in range(count)]
        assert weighted_median(values, [1 / count] * count) == pytest.approx(statistics.median(values))
    assert weighted_median([1.0, 2.0], [0.75, 0.25]) == pytest.approx(1.25)
    assert weighted_median([1.0, 2.0, 3.0], [0.98, 0.01, 0.01]) == pytest.approx(1.0, abs=0.03)


def test_without_slices_the_intervals_of_the_timings_count() -> None:
    assert standard_error(block(FAST, 5.0), block(BASE, 10.0)) == pytest.approx(0.0144, rel=0.05)


def test_the_interval_holds_the_truth_as_often_as_it_says(spec: Spec) -> None:
    """200 verifications of two blocks, where pairs of processes differ by 2% and turns by 3%."""
    job, rng, held = spec(search={"objective": "throughput"}), random.Random(0), 0
    for trial in range(200):
        blocks: tuple[Block, ...] = ()
        for number in range(2):
            away = rng.gauss(0, 0.02)
            measured_twice = block(BASE, 10.0 * (1 + away + rng.gauss(0, 0.015)), number), block(FAST, 5.0, number)
            blocks += tuple(sliced(one, [1.0] * 8, rng.randrange(1 << 30), 0.03) for one in measured_twice)
        found = ratio(job, blocks, FAST, BASE)
        assert found is not None, trial
        held += found[1] <= 2.0 <= found[2]
    assert held >= 180


@pytest.mark.parametrize(("spread", "least"), [(0.03, 0.9), (0.05, 0.75)])
def test_blocks_that_scatter_widen_the_interval_and_ask_for_more(spec: Spec, spread: float, least: float) -> None:
    """200 verifications that end as real ones do, where pairs of processes differ by more than is usual."""
    job, rng, held, count = spec(search={"objective": "throughput"}), random.Random(0), 0, 0
    for _ in range(200):
        blocks: tuple[Block, ...] = ()
        for number in range(4):
            base = block(BASE, 10.0 * (1 + rng.gauss(0, spread)), number)
            blocks += tuple(sliced(one, [1.0] * 8, rng.randrange(1 << 30)) for one in (base, block(FAST, 5.0, number)))
            if number and is_sure(ratio(job, blocks, FAST, BASE)):
                break
        found = ratio(job, blocks, FAST, BASE)
        assert found is not None
        held, count = held + (found[1] <= 2.0 <= found[2]), count + len(blocks) // 2
    assert held >= least * 200 and count > 2.1 * 200
    apart = (block(BASE, 10.0), block(FAST, 5.0), block(BASE, 13.0, 1), block(FAST, 5.0, 1))
    assert not is_sure(ratio(job, apart, FAST, BASE))


def test_one_block_that_others_disturbed_rules_nobody_out(spec: Spec) -> None:
    request = VerifyRequest(method="lora", baseline=BASE, finalists=(FAST, NEAR), blocks=2, seconds_limit=60)
    calm = (block(BASE, 10.0), block(FAST, 5.0), block(NEAR, 6.5))
    assert certainly_slower(spec(), request, calm) == {NEAR.configuration.key}
    disturbed = [
        one.model_copy(update={"timing": one.timing and one.timing.model_copy(update={"clean_share": 0.3})})
        for one in calm
    ]
    assert certainly_slower(spec(), request, tuple(disturbed)) == set()


def test_one_that_ran_beside_the_baseline_alone_is_ranked_with_the_others(spec: Spec) -> None:
    """As one that the soak gave a smaller micro batch: the first finalist has most blocks, and none with it."""
    blocks = (
        *(block(one, seconds, number) for number in range(3) for one, seconds in ((FAST, 5.0), (BASE, 10.0))),
        block(FAST, 5.0, 3),
        *(block(one, seconds, 4) for one, seconds in ((NEAR, 8.0), (BASE, 20.0))),
    )
    costs = relative_costs(spec(), blocks, [FAST, BASE, NEAR])
    assert costs[NEAR.configuration.key] == pytest.approx(0.8 * costs[FAST.configuration.key], rel=0.02)


def kept(one: Block, process: int) -> Block:
    """The block, trained by a process that was started for another one."""
    return one.model_copy(update={"process": process})


def test_blocks_of_one_process_tell_less_than_blocks_of_several() -> None:
    ours, theirs = ([block(one, 10.0, number) for number in range(4)] for one in (FAST, BASE))
    same = [0.25] * 4
    assert process_pairs(list(zip(ours, theirs, strict=True)), same) == pytest.approx(4.0)
    two = [kept(one, one.block // 2 * 2) if one.block % 2 else one for one in ours]
    other = [kept(one, one.block // 2 * 2) if one.block % 2 else one for one in theirs]
    assert process_pairs(list(zip(two, other, strict=True)), same) == pytest.approx(2.0)
    assert process_pairs(list(zip(two, theirs, strict=True)), same) == pytest.approx(8 / 3), "fresh on one side only"
    assert process_pairs([(ours[0], theirs[0])], [1.0]) == 1.0
    assert process_pairs(list(zip(ours, theirs, strict=True))[:2], [0.9, 0.1]) == pytest.approx(1 / 0.82)


def test_the_interval_holds_the_truth_where_processes_train_two_blocks(spec: Spec) -> None:
    """200 verifications of four blocks, of which each two have the same pair of processes, that differ by 2%."""
    job, rng, held = spec(search={"objective": "throughput"}), random.Random(0), 0
    for _ in range(200):
        blocks: tuple[Block, ...] = ()
        away = 0.0
        for number in range(4):
            away = rng.gauss(0, 0.02) if number % 2 == 0 else away
            both = (
                sliced(block(BASE, 10.0 * (1 + away), number), [1.0] * 8, rng.randrange(1 << 30), 0.005),
                sliced(block(FAST, 5.0, number), [1.0] * 8, rng.randrange(1 << 30), 0.005),
            )
            blocks += both if number % 2 == 0 else tuple(kept(one, number - 1) for one in both)
        found = ratio(job, blocks, FAST, BASE)
        assert found is not None
        held += found[1] <= 2.0 <= found[2]
    assert held >= 185


def test_a_verification_is_settled_when_order_and_speedup_are_sure(spec: Spec) -> None:
    job = spec(search={"objective": "throughput"})
    request = VerifyRequest(method="lora", baseline=BASE, finalists=(FAST, NEAR), blocks=9, seconds_limit=60)

    def blocks(count: int, near: float) -> tuple[Block, ...]:
        return tuple(
            sliced(block(one, seconds, number), [1.0] * 8, 10 * number + at, 0.001)
            for number in range(count)
            for at, (one, seconds) in enumerate(((BASE, 10.0), (FAST, 5.0), (NEAR, near)))
        )

    assert settled(job, request, blocks(2, 6.0)) and certainly_slower(job, request, blocks(2, 6.0))
    assert not settled(job, request, blocks(2, 5.02)), "which of them is faster is not known yet"
    assert certainly_slower(job, request, blocks(2, 5.02)) == set()


def test_costs_are_compared_only_in_blocks_that_both_ran_in(spec: Spec) -> None:
    """The machine is twice as slow in the second block, in which only two of three ran."""
    job = spec(search={"objective": "throughput"})
    blocks = tuple(block(one, seconds, 0) for one, seconds in ((BASE, 10.0), (FAST, 5.0), (NEAR, 5.5)))
    blocks += tuple(block(one, seconds, 1) for one, seconds in ((BASE, 20.0), (FAST, 10.0)))
    costs = relative_costs(job, blocks, [BASE, FAST, NEAR])
    assert costs[FAST.configuration.key] == pytest.approx(0.5) and costs[BASE.configuration.key] == 1.0
    assert costs[NEAR.configuration.key] == pytest.approx(0.55)


def test_two_that_never_ran_together_are_compared_by_way_of_the_surest_of_the_others(spec: Spec) -> None:
    """Both ran in four blocks beside the baseline, and in one beside a third one that says something else."""
    job, third = spec(search={"objective": "throughput"}), measured(configuration(padding="multiple-8"), 5.0)
    blocks = tuple(block(one, took, at) for at in range(4) for one, took in ((FAST, 5.0), (BASE, 10.0)))
    blocks += tuple(block(one, took, at) for at in range(4, 8) for one, took in ((NEAR, 16.0), (BASE, 20.0)))
    blocks += tuple(block(one, 7.0, at) for at, other in ((8, FAST), (9, NEAR)) for one in (other, third))
    near, far = ratio(job, blocks, NEAR, BASE), ratio(job, blocks, BASE, FAST)
    found = chained(job, blocks, NEAR, FAST, [BASE, third])
    assert near is not None and far is not None and found is not None
    assert found[0] == pytest.approx(0.5 / 0.8)
    widths = [math.log(one[2] / one[0]) for one in (near, far, found)]
    assert widths[2] == pytest.approx(math.hypot(*widths[:2])), "the errors of both count"
    assert found[0] / found[1] == pytest.approx(found[2] / found[0])


def test_finalists_that_are_tied_or_have_failed_need_no_more_blocks(spec: Spec) -> None:
    job = spec(search={"objective": "throughput"})
    request = VerifyRequest(method="lora", baseline=BASE, finalists=(FAST, NEAR), blocks=9, seconds_limit=60)
    equal = ((BASE, 10.0), (FAST, 5.0), (NEAR, 5.0))
    blocks = tuple(sliced(block(one, took, at), [1.0] * 8, at, 1e-4) for at in range(20) for one, took in equal)
    assert settled(job, request, blocks)
    assert settled(job, request, blocks[: 3 * 8]), "a verification has no more than eight or twelve"
    assert not settled(job, request, blocks[: 3 * 2])
    found = ratio(job, blocks, FAST, NEAR)
    assert found is not None, "and no interval is narrower than processes differ"
    assert math.log(found[2] / found[0]) > 0.95 * NORMAL * PROCESS_SPREAD / math.sqrt(20)
    crashed = tuple(block(one, 5.0, outcome=Outcome.crashed) for one in (FAST, NEAR))
    assert settled(job, request, (block(BASE, 10.0), *crashed))


def test_two_turns_tell_nothing_of_how_turns_differ() -> None:
    """Two that happen to agree would make an interval of no width."""
    ours, theirs = (sliced(one, [1.0] * 2, 0, 0.0) for one in (block(FAST, 5.0), block(BASE, 10.0)))
    assert standard_error(ours, theirs) == pytest.approx(0.0144, rel=0.05)
