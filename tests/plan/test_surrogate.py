"""The surrogate learns what choices and pairs of them do; the grid knows valid rows; `Feasibility` what cannot run."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, MemoryLine, Outcome, Probe
from service.contract.states import Origin
from service.contract.task import EarlierTrial, PlanInput, TrialRecord
from service.levers import LEVERS, excluded
from tests.factory import DATASET, configuration, failed, measured, record
from worker.plan import plan
from worker.plan.feasibility import Feasibility
from worker.plan.grid import Grid
from worker.plan.prior import Prior, is_limited, padded_share
from worker.plan.proposers.improvement import promising
from worker.plan.space import point
from worker.plan.surrogate import Surrogate
from worker.plan.view import View

Facts = Callable[..., HardwareFacts]
Spec = Callable[..., JobSpec]
GPU = {"device": "cuda", "capability": (9, 0), "has_own_memory": True, "memory_bytes": 24 << 30, "bf16_native": True}


def seen(spec: JobSpec, facts: HardwareFacts, *measurements: Measurement) -> View:
    """The view of a job with these trials, the first its baseline."""
    records = tuple(
        record(one, Origin.recipe if at else Origin.baseline, at + 1) for at, one in enumerate(measurements)
    )
    return View(PlanInput(spec=spec, facts=facts, history=records, next_number=len(records) + 1), "lora")


def grid_of(view: View) -> Grid:
    return Grid(view.spec, "lora", view.choices, view.effectives, [one.configuration for one in view.history])


def test_rows_are_configurations_and_neighbours_are_valid(spec: Spec, facts: Facts) -> None:
    view = seen(spec(), facts(**GPU), measured(configuration()))
    grid = grid_of(view)
    made = configuration(precision="bf16-mixed", attention="varlen", batching="padding-free")
    row = grid.encode(made)
    assert grid.decode(row) == made
    near = grid.neighbours(row, 2)
    assert len(near) == len({tuple(one) for one in near}) and tuple(row) not in {tuple(one) for one in near}
    assert all(1 <= (one != row).sum() <= 2 for one in near)
    found = [grid.decode(one) for one in near[::40]]
    assert all(one is not None and excluded(point(one, view.spec)) is None for one in found)
    outside = grid.encode(configuration())
    assert not grid.valid(outside[None, :])[0], "precision=checkpoint is no choice of the search"
    assert grid.valid(grid.nearest(outside)[None, :])[0]


def test_the_surrogate_finds_out_what_choices_do(spec: Spec, facts: Facts) -> None:
    """Of an additive truth that is far from the prior, it learns each choice from a trial or two."""
    view = seen(spec(), facts(**GPU), measured(configuration()))
    grid = grid_of(view)
    prior = Prior(view, grid)
    rng = np.random.default_rng(0)
    truth = prior.mean + rng.normal(size=prior.mean.shape) * prior.spread

    def true(rows: Any) -> Any:
        return truth[np.arange(truth.shape[0]), rows].sum(axis=1)

    start = grid.nearest(grid.encode(configuration()))
    rows = np.vstack([start[None, :], grid.neighbours(start)])
    surrogate = Surrogate(prior, rows, true(rows), np.full(len(rows), 0.01))
    tried = {(column, row[column]) for row in rows for column in range(len(start))}
    far = np.array([row for row in grid.neighbours(start, 2) if {*enumerate(row)} <= tried])
    mean, deviation = surrogate.predict(far)
    assert np.quantile(np.abs(mean - true(far)), 0.9) < 0.05
    assert (np.abs(mean - true(far)) < 3 * deviation + 0.01).mean() > 0.95
    before = Surrogate(prior, rows[:1], true(rows[:1]), np.full(1, 0.01))
    assert (before.predict(far)[1] > deviation).all(), "what was measured makes it surer"


def test_a_surprising_pair_is_learnt_where_it_was_measured(spec: Spec, facts: Facts) -> None:
    view = seen(spec(), facts(**GPU), measured(configuration()))
    grid = grid_of(view)
    prior = Prior(view, grid)
    choices: list[dict[str, Any]] = [
        {},
        {"compile": "per-layer"},
        {"padding": "multiple-64"},
        {"compile": "per-layer", "padding": "multiple-64"},
        {"compile": "per-layer", "padding": "multiple-64", "allocator": "expandable"},
    ]
    rows = np.array([grid.encode(configuration(precision="bf16-mixed", **one)) for one in choices])
    values = np.array([0.0, -0.2, -0.2, 0.1, 0.1])
    surrogate = Surrogate(prior, rows[:4], values[:4], np.full(4, 0.01))
    mean, _ = surrogate.predict(rows)
    assert abs(mean[4] - 0.1) < 0.08, "the pair is 0.5 slower than the sum of both, wherever it is in"


def test_assumptions_are_weighed_by_what_was_measured(spec: Spec, facts: Facts) -> None:
    """Where measurements are additive, pairs count for little; where pairs change everything, it is less sure."""
    view = seen(spec(), facts(**GPU), measured(configuration()))
    grid = grid_of(view)
    prior = Prior(view, grid)
    start = grid.nearest(grid.encode(configuration()))
    rows = np.vstack([start[None, :], grid.neighbours(start, 2)])
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    plain, noise = prior.expected(rows), np.full(30, 0.01)
    wild = plain + np.random.default_rng(1).normal(size=len(rows)) * 0.3
    sure, unsure = (Surrogate(prior, rows[:30], values[:30], noise) for values in (plain, wild))
    assert sum(share for _, share in sure._fits) == pytest.approx(1.0)
    assert (sure.predict(rows[30:90])[1] < unsure.predict(rows[30:90])[1]).mean() > 0.9


def test_choices_that_do_nothing_alone_may_do_something_together(spec: Spec, facts: Facts) -> None:
    view = seen(spec(), facts(**GPU), measured(configuration()))
    grid = grid_of(view)
    prior = Prior(view, grid)
    small: list[dict[str, Any]] = [{}, {"allocator": "expandable"}, {"vocabulary": "multiple-64"}]
    rows = np.array([grid.encode(configuration(precision="bf16-mixed", **one)) for one in small])
    both = grid.encode(configuration(precision="bf16-mixed", allocator="expandable", vocabulary="multiple-64"))
    surrogate = Surrogate(prior, rows, prior.expected(rows), np.full(3, 0.01))
    alone = surrogate.predict(rows[1:])[1].max()
    assert surrogate.predict(both[None, :])[1][0] > 2 * alone, "both singles are known, and both together are not"


def test_what_lacks_what_it_needs_is_unsure(spec: Spec, facts: Facts) -> None:
    """Asked for by name, workers on too few cores may be slow, or not."""
    named = spec(search={"levers": ["loading", "precision"]})
    view = seen(named, facts(cores=4), measured(configuration()))
    grid = grid_of(view)
    at = grid.names.index("loading")
    few, many = (grid.options[at].index(name) for name in ("workers-2", "workers-4"))
    prior = Prior(view, grid)
    assert prior.spread[at, many] > 4 * prior.spread[at, few] and prior.mean[at, many] > prior.mean[at, few]


def test_what_needs_no_less_memory_than_what_did_not_fit_is_ruled_out(spec: Spec, facts: Facts) -> None:
    full = failed(configuration(precision="fp32"), Outcome.infeasible, "out of memory at a micro batch of 1")
    slimmer = failed(configuration(precision="fp32", attention="varlen"), Outcome.infeasible, "out of memory")
    named = spec(search={"levers": list(LEVERS)})  # so that eager attention is searched on a GPU, too
    view = seen(named, facts(**GPU), failed(configuration(micro=8)), full, slimmer)
    grid = grid_of(view)
    feasibility = Feasibility(view, grid)
    more = grid.encode(configuration(precision="fp32", attention="eager"))
    less = grid.encode(configuration(precision="bf16-mixed", checkpointing="full", head="chunked"))
    assert list(feasibility.impossible(np.array([more, less]))) == [True, False]
    plain = grid.encode(configuration(precision="bf16-mixed"))
    chances = feasibility.chance(np.array([less, plain]))
    assert chances[0] >= chances[1] >= feasibility.chance(more[None, :])[0], (
        "it has fewer of the choices that failed together"
    )
    assert list(feasibility.saved(np.array([less, plain]))) == sorted(
        feasibility.saved(np.array([less, plain])), reverse=True
    )
    assert is_limited(view)


def test_a_memory_line_rules_out_what_would_be_far_over(spec: Spec, facts: Facts) -> None:
    line = MemoryLine(rest_bytes=4e9, slope_bytes=15e9)
    slim = configuration(precision="bf16-mixed", checkpointing="full", head="chunked")
    size: dict[str, Any] = {"parameters": 1_000_000_000, "trainable_parameters": 1_000_000}
    ran = measured(slim, memory_line=line, capacity_bytes=24 << 30, **size)
    view = seen(spec(), facts(**GPU), ran)
    grid = grid_of(view)
    rows = np.array([grid.encode(one) for one in (slim, configuration(precision="bf16-mixed"))])
    assert list(Feasibility(view, grid).impossible(rows)) == [False, True], "15 GB / 0.16 a sample on 24 GiB"


def test_failures_that_are_no_memorys_lower_the_chance_of_the_like(spec: Spec, facts: Facts) -> None:
    view = seen(
        spec(),
        facts(**GPU),
        measured(configuration()),
        measured(configuration(precision="bf16-mixed")),
        failed(configuration(precision="bf16-mixed", compile="whole"), Outcome.unstable, "the loss is off"),
    )
    grid = grid_of(view)
    rows = [configuration(precision="bf16-mixed", padding="multiple-64", compile=one) for one in ("whole", "per-layer")]
    chances = Feasibility(view, grid).chance(np.array([grid.encode(one) for one in rows]))
    assert chances[0] < 0.5 < chances[1]


def test_one_of_a_family_tells_of_the_others(spec: Spec, facts: Facts) -> None:
    view = seen(spec(), facts(**GPU), measured(configuration()))
    grid = grid_of(view)
    prior = Prior(view, grid)
    names = ("fp32", "bf16-mixed", "bf16-mixed-uncached", "tf32")
    rows = np.array([grid.encode(configuration(precision=one)) for one in names])
    before = Surrogate(prior, rows[:1], np.array([0.0]), np.full(1, 0.01))
    after = Surrogate(prior, rows[:2], np.array([0.0, 0.3]), np.full(2, 0.01))
    learnt = after.predict(rows)[0] - before.predict(rows)[0]
    assert learnt[2] > 1.3 * learnt[3] > 0, "the other autocast is slower than was expected, too, and tf32 a little"
    unsure = after.predict(rows)[1] / before.predict(rows)[1]
    assert unsure[2] < unsure[3]


def test_two_failures_are_blamed_on_what_they_have_in_common(spec: Spec, facts: Facts) -> None:
    """And what has only a part of it may run, while what has all of it is not tried a third time."""
    plain: dict[str, Any] = {"precision": "bf16-mixed"}
    view = seen(
        spec(),
        facts(**GPU),
        measured(configuration(**plain)),
        failed(configuration(**plain, compile="whole", padding="multiple-8"), Outcome.crashed, "SIGSEGV"),
    )
    twice = seen(
        spec(),
        facts(**GPU),
        *(one.measurement for one in view.known.history),
        failed(configuration(**plain, compile="whole", kernels="liger"), Outcome.crashed, "SIGSEGV"),
    )

    def chances(of: View) -> list[float]:
        tried: list[dict[str, Any]] = [
            {"compile": "whole", "padding": "multiple-8", "allocator": "expandable"},
            {"compile": "whole"},
            {"padding": "multiple-8"},
            {"allocator": "expandable"},
        ]
        grid = grid_of(of)
        rows = np.array([grid.encode(configuration(**plain, **one)) for one in tried])
        return [float(one) for one in Feasibility(of, grid).chance(rows)]

    both, compiled, padded, other = chances(view)
    assert both < 0.1 and other > 0.95, "all that may be to blame is in the first, nothing of it in the last"
    assert 0.3 < compiled < 0.7 and 0.3 < padded < 0.7, "either may be"
    both, compiled, padded, other = chances(twice)
    assert both < 0.1 and compiled < 0.1 and padded > 0.8


def test_where_nothing_fits_it_leaps_to_what_saves_memory(spec: Spec, facts: Facts) -> None:
    """The leap goes on where all neighbours of the baseline are ruled out, and then looks around its end."""
    slim: dict[str, Any] = {
        "precision": "bf16-mixed",
        "checkpointing": "full",
        "optimizer": "adamw-8bit",
        "batching": "packed",
    }
    reason = "out of memory at a micro batch of 1"
    none_fits = (Probe(micro_batch_size=1, peak_bytes=None),)
    tried: list[dict[str, Any]] = [{}, {"precision": "fp32"}, slim, {**slim, "attention": "varlen"}]
    lacking = [failed(configuration(**one), Outcome.infeasible, reason, probes=none_fits) for one in tried]
    view = seen(spec(), facts(**GPU), *lacking)
    feasibility, grid = Feasibility(view, grid_of(view)), grid_of(view)
    found = next(iter(promising(view)))
    saved = feasibility.saved(np.array([grid.encode(found), *(grid.encode(one.configuration) for one in lacking)]))
    assert saved[0] > saved[1:].max(), "it saves more than all that did not fit"


def test_a_probe_that_ran_at_one_makes_nothing_hopeless(spec: Spec, facts: Facts) -> None:
    fewer = failed(configuration(precision="fp32")).model_copy(
        update={"probes": (Probe(micro_batch_size=1, peak_bytes=5), Probe(micro_batch_size=2, peak_bytes=None))}
    )
    view = seen(spec(), facts(**GPU), measured(configuration()), fewer)
    grid = grid_of(view)
    assert not Feasibility(view, grid).impossible(grid.encode(configuration(precision="fp32"))[None, :])[0]


def test_the_prior_knows_the_job(spec: Spec, facts: Facts) -> None:
    lengths = DATASET.model_copy(update={"histogram": {"100": 50, "200": 50}})
    baseline = measured(configuration(micro=8), predicted_micro_batch=64, dataset=lengths)
    view = seen(spec(), facts(**GPU), baseline)
    grid, host = grid_of(view), seen(spec(), facts(), baseline)
    assert math.isclose(padded_share(view), 1 - 150 / (200 - 100 * 0.5**8)), "the longest of 8 is nearly always 200"
    own, other = Prior(view, grid), Prior(host, grid_of(host))
    compiled = [
        one.expected(grid_.encode(configuration(compile="per-layer"))[None, :])[0]
        for one, grid_ in ((own, grid), (other, grid_of(host)))
    ]
    assert compiled[0] < 0.0 < compiled[1], "on the host, generated kernels are slower"
    order = ["padded", "sorted", "grouped", "padding-free"]
    expected = [own.expected(grid.encode(configuration(batching=one))[None, :])[0] for one in order]
    assert all(more > less for more, less in pairwise(expected)), "the more padding it leaves out, the faster"


def test_memory_that_limits_the_batch_changes_what_is_expected(spec: Spec, facts: Facts) -> None:
    tight = measured(configuration(micro=1), predicted_micro_batch=1, largest_micro_batch=1, micro_batch_size=1)
    assert tight.timing is not None
    few = tight.timing.model_copy(update={"padded_tokens": 1000 * tight.timing.steps})
    many = few.model_copy(update={"padded_tokens": 16_000 * few.steps})
    tight, busy = (tight.model_copy(update={"timing": one}) for one in (few, many))
    view = seen(spec(), facts(**GPU), tight)
    assert not is_limited(seen(spec(), facts(**GPU), busy)), "4,000 tokens a micro batch keep the GPU busy"
    roomy = seen(spec(), facts(**GPU), measured(configuration(micro=8), predicted_micro_batch=64))
    row = configuration(checkpointing="full")
    limited = Prior(view, grid_of(view)).expected(grid_of(view).encode(row)[None, :])[0]
    free = Prior(roomy, grid_of(roomy)).expected(grid_of(roomy).encode(row)[None, :])[0]
    assert is_limited(view) and not is_limited(roomy)
    assert limited < 0 < free


def test_a_baselines_given_batch_says_nothing_of_memory_unless_it_fills_it(spec: Spec, facts: Facts) -> None:
    """Trainer's batch of 8 is less than the job's 32, but nobody looked whether more feasibility."""
    given: dict[str, Any] = {"predicted_micro_batch": None, "largest_micro_batch": 8, "micro_batch_size": 8}
    for peak, limited in ((1 << 30, False), (2 << 30, True)):
        one = measured(configuration(micro=8), peak_bytes=peak, capacity_bytes=3 << 30, **given)
        assert is_limited(seen(spec(), facts(**GPU), one)) is limited


def test_on_the_host_saving_memory_is_not_expected_to_be_faster(spec: Spec, facts: Facts) -> None:
    tight = measured(configuration(), predicted_micro_batch=1, largest_micro_batch=1, micro_batch_size=1)
    view = seen(spec(), facts(), tight)
    row = grid_of(view).encode(configuration(checkpointing="selective"))[None, :]
    assert is_limited(view) and Prior(view, grid_of(view)).expected(row)[0] > 0


def earlier(made: Configuration, ratio: float, same: bool) -> EarlierTrial:
    return EarlierTrial(configuration=made, ratio=ratio, parameters=1_000, dataset=DATASET.fingerprint, same_job=same)


@pytest.mark.parametrize("same", [True, False])
def test_earlier_trials_say_what_to_try_first(spec: Spec, facts: Facts, same: bool) -> None:
    """A choice that nobody would expect to help halved the seconds of an earlier job on this hardware."""
    best = configuration(precision="fp32", vocabulary="multiple-8")
    changes: list[dict[str, Any]] = [{}, {"attention": "eager"}, {"padding": "multiple-8"}]
    others = [configuration(precision="fp32", **one) for one in changes]
    before = (earlier(best, 0.5, same), *(earlier(one, 1.0, same) for one in others))
    baseline = record(measured(configuration(micro=8), 10.0, parameters=1_500), Origin.baseline)
    known = PlanInput(spec=spec(), facts=facts(), history=(baseline,), earlier=before, next_number=2)
    decision = plan(known)
    assert decision.trials[0].configuration.levers["vocabulary"] == "multiple-8"
    assert ("4 of the same job" if same else "4 of similar jobs") in " ".join(decision.notes)
    larger = [one.model_copy(update={"parameters": 9_000}) for one in before]
    unlike = plan(known.model_copy(update={"earlier": tuple(larger)}))
    assert not unlike.notes, "another size of model tells nothing"
    old = best.model_copy(update={"levers": {"precision": "fp32"}})
    assert not plan(known.model_copy(update={"earlier": (earlier(old, 0.5, same),)})).notes, "of an older catalogue"


def run(job: JobSpec, facts: HardwareFacts, before: tuple[EarlierTrial, ...]) -> list[TrialRecord]:
    """Plan and measure until no trial is asked for: token-budget with a head in chunks is best by far."""
    records: list[TrialRecord] = []
    while True:
        known = PlanInput(spec=job, facts=facts, history=tuple(records), earlier=before, next_number=len(records) + 1)
        trials = plan(known).trials
        if not trials:
            return records
        levers = trials[0].configuration.levers
        seconds = 6.0 if levers["batching"] == "token-budget" else 10.0
        made = measured(
            trials[0].configuration, seconds * (0.8 if levers["head"] == "chunked" else 1), parameters=1_000
        )
        records.append(TrialRecord(request=trials[0], measurement=made))


def test_the_same_job_again_needs_few_trials(spec: Spec, facts: Facts) -> None:
    def seconds(record: TrialRecord) -> float:
        timing = record.measurement.timing
        assert timing is not None
        return timing.seconds

    job = spec(search={"trials": 60, "minutes": 6000})
    first = run(job, facts(), ())
    before = tuple(earlier(one.measurement.configuration, seconds(one) / 10.0, True) for one in first[1:])
    again = run(job, facts(), before)
    assert len(again) < len(first) / 2
    assert min(map(seconds, again[:6])) == min(map(seconds, first)), "what was best then is tried at once"


def test_the_jobs_memory_cap_counts(spec: Spec, facts: Facts) -> None:
    line = MemoryLine(rest_bytes=4e9, slope_bytes=2e9)
    slim = configuration(precision="bf16-mixed", checkpointing="full", head="chunked")
    ran = measured(slim, memory_line=line, capacity_bytes=None)
    wide = grid_of(seen(spec(), facts(**GPU), ran)).encode(configuration(precision="bf16-mixed"))[None, :]
    for cap, impossible in ((None, False), (8, True)):
        view = seen(spec(hardware={"memory_gib": cap}), facts(**GPU), ran)
        assert Feasibility(view, grid_of(view)).impossible(wide)[0] == impossible, "16.5 GB a sample"


def test_what_two_choices_take_to_compile_is_not_counted_twice(spec: Spec, facts: Facts) -> None:
    both: dict[str, Any] = {"compile": "per-layer", "attention": "flex", "precision": "bf16-mixed"}
    view = seen(spec(), facts(**GPU), measured(configuration()), measured(configuration(**both), compile_seconds=90.0))
    grid = grid_of(view)
    once = Prior(view, grid).once(np.array([grid.encode(configuration(**both))]))
    assert once[0] == pytest.approx(90.0)


def test_the_baselines_levers_are_tried_at_a_free_micro_batch(spec: Spec, facts: Facts) -> None:
    """All levers are fixed to the baseline's choices: only the micro batch is left to look for."""
    fixed = {name: "fp32" if name == "precision" else lever.baseline for name, lever in LEVERS.items()}
    job = spec(baseline={}, search={"fixed": fixed, "trials": 5})
    baseline = measured(configuration(micro=8, precision="fp32"), 10.0)
    decision = plan(PlanInput(spec=job, facts=facts(), history=(record(baseline, Origin.baseline),), next_number=2))
    assert [one.configuration.micro_batch_size for one in decision.trials] == [None]
