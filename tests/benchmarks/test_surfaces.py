"""Surfaces of known truth: their best is that of all configurations, and policies are judged by it."""

from __future__ import annotations

import math
import random
import statistics
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.search_regret import cost, regret, written
from benchmarks.simulated_gpu import run
from benchmarks.surfaces import build, drawn
from benchmarks.surfaces.analytic import Analytic
from benchmarks.surfaces.base import normal
from benchmarks.surfaces.lengths import BATCHING, Lengths, arrange
from benchmarks.surfaces.mechanistic import MECHANISTIC
from benchmarks.surfaces.policies import POLICIES, measured_score
from benchmarks.surfaces.recorded import NOISE, SPREADS, TABLES, Recorded, Table, every, tables, told, valid
from benchmarks.surfaces.synthetic import FAR, synthetic
from service.contract.measurement import Outcome
from service.contract.objective import score
from service.levers import LEVERS
from service.levers.base import Choice, Lever

MOST = 400  # configurations that a test computes one by one


def narrowed(name: str, seed: int) -> Analytic:
    """A surface in whose job all but some random levers are fixed, so that few configurations are left."""
    full = drawn.analytic(name)
    rng = random.Random(seed)
    free = rng.sample(sorted(lever for lever, choices in full.options.items() if len(choices) > 1), 4)
    while True:
        fixed = {lever: full.options[lever][0] for lever in LEVERS if lever not in free}
        search = full.spec.search.model_copy(update={"fixed": fixed})
        made = Analytic("synthetic", "narrow", full.spec.model_copy(update={"search": search}), full.facts, full.world)
        if math.prod(map(len, made.options.values())) * len(made.effectives) <= MOST:
            return made
        free.pop()


@pytest.mark.parametrize(
    ("name", "seed"), [("synthetic-01", 1), ("synthetic-02", 2), ("synthetic-04", 3), ("llama-8b-lora", 4)]
)
def test_the_best_is_that_of_all_valid_configurations(name: str, seed: int) -> None:
    surface = narrowed(name, seed)
    each = every(surface.spec, surface.method, surface.reachable, surface.effectives)
    lowest = min((surface.true_score(one) for one in each), default=math.inf)
    assert surface.found[0] == pytest.approx(lowest)
    assert surface.best == min(surface.found[0], surface.true_score(surface.start))


def test_the_best_is_found_by_its_own_configuration() -> None:
    surface = MECHANISTIC["bert-12gib"]()
    best, levers, effective = surface.found
    made = surface.start.model_copy(
        update={
            "levers": {name: levers[name] for name in surface.start.levers},
            "effective_batch_size": effective,
            "micro_batch_size": None,
        }
    )
    assert surface.valid(made)
    assert surface.true_score(made) == pytest.approx(best)


def test_at_least_half_of_fifty_synthetic_surfaces_are_three_switches_from_all_that_a_search_begins_with() -> None:
    switches = [drawn.entries()[name]["switches"] for name in drawn.SYNTHETIC]
    assert len(switches) >= 50
    assert all(one >= FAR for one in switches[::2])


@pytest.mark.parametrize("name", ["bert-12gib", "synthetic-01", "synthetic-08"])
def test_the_file_holds_what_is_computed(name: str) -> None:
    entry, surface = drawn.entries()[name], drawn.analytic(name)
    assert surface.fingerprint == entry["fingerprint"], "run python -m benchmarks.surfaces"
    del surface.__dict__["best"]
    assert surface.best == pytest.approx(entry["best"])


def test_a_surface_is_the_same_whenever_it_is_made() -> None:
    attempt = drawn.entries()["synthetic-01"]["attempt"]
    first, second = synthetic(1, attempt), synthetic(1, attempt)
    assert first is not None and second is not None
    assert first.fingerprint == second.fingerprint
    assert first.measure(first.start, 3) == second.measure(second.start, 3)
    third = first.measure(first.start, 4)
    assert third.timing and third != first.measure(first.start, 3)


def test_every_effective_batch_has_the_same_samples() -> None:
    """Or the search would be blamed for not knowing which batch was drawn shorter ones."""
    found = arrange(Lengths(median=60, spread=0.8, longest=256, rows=2000), (8, 16, 32, 64))
    assert found.real / np.array(found.effectives) == pytest.approx(found.real[0] / 8)
    free = found.tokens[BATCHING.index("padding-free"), 0, 3]
    assert free / np.array(found.effectives) == pytest.approx(free[0] / 8)
    padded = found.tokens[BATCHING.index("padded"), 0, 3]
    assert (padded > free).all()


def test_only_qlora_s_weights_are_quantised() -> None:
    lora, qlora = build("llama-8b-lora"), build("llama-8b-qlora")
    assert isinstance(lora, Analytic) and isinstance(qlora, Analytic)
    rest = [float(one.evaluated(one.start.at_micro_batch(None)).rest[0]) for one in (lora, qlora)]
    assert rest[0] / lora.world.model.parameters == pytest.approx(2, rel=0.2), "two bytes a weight of a checkpoint"
    assert rest[1] / qlora.world.model.parameters < 1


def test_a_measurement_s_score_is_the_true_one_with_noise() -> None:
    surface = MECHANISTIC["bert-139gib"]()
    measured = [score(surface.spec, surface.measure(surface.start, seed)) for seed in range(50)]
    true = surface.true_score(surface.start)
    assert all(abs(one / true - 1) < 0.06 for one in measured)
    assert abs(sum(measured) / 50 / true - 1) < 0.006
    assert len(set(measured)) == 50
    assert normal("a", 1) == normal("a", 1) != normal("a", 2)


def test_what_does_not_fit_is_infeasible_with_a_reason() -> None:
    surface = MECHANISTIC["llama-8b-lora"]()
    found = surface.measure(surface.start, 0)
    assert found.outcome is Outcome.infeasible and "out of memory" in found.reason
    assert math.isinf(surface.true_score(surface.start)) and found.probes[0].peak_bytes is None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_begins_with_the_baseline_and_is_deterministic(policy: str) -> None:
    surface = MECHANISTIC["bert-12gib"]()
    found = POLICIES[policy](surface, 8, 1)
    assert found[0] == surface.start and len({one.key for one in found}) == 8
    assert all(surface.valid(one) for one in found[1:])
    assert [one.key for one in POLICIES[policy](surface, 8, 1)] == [one.key for one in found]


def test_regret_is_of_what_measured_best() -> None:
    run = [[math.inf, math.inf, 0.1], [12.0, 11.0, 0.2], [11.5, 12.0, 0.3]]
    assert math.isinf(regret(run, 1, 10.0))
    assert regret(run, 2, 10.0) == pytest.approx(0.1)
    assert regret(run, 3, 10.0) == pytest.approx(0.2)
    assert cost([*run, [11.0, 10.2, 0.1], [10.9, 10.0, 0.2]], 10.0) == pytest.approx(0.7), "the fourth is within 3%"
    assert cost([*run, [11.0, 10.2, 0.1], [10.9, 10.5, 0.2]], 10.0) == math.inf, "what measured best is not any more"
    assert written({"a": math.inf, "b": [0.1]}) == {"a": "inf", "b": [0.1]}


def test_turns_with_the_baseline_are_the_truth(tmp_path: Path) -> None:
    source = narrowed("synthetic-01", 1)
    file = tmp_path / "some-table.json"
    table = Table(file, source.spec, source.facts)
    for one in table.missing():
        table.add(source.measure(one, 0))
    good = [one for one in table.measurements().values() if one.timing]
    rounds: dict[int, list[list[str]]] = {}
    for number, group in table.groups(2, 4):
        rounds.setdefault(number, []).append([one.configuration.key for one in group])
    first, second = ([key for group in rounds[number] for key in group] for number in (0, 1))
    assert sorted(first) == sorted(second) and first != second, "all of them a round, in another order"
    assert len(first) == len(good) - 1 and max(map(len, rounds[0])) == 4
    key, other = first[0], first[1]
    for number in range(3):
        table.add_ratios(number, {key: 0.6})
    base = table.baseline().timing
    assert base is not None
    counted = Table(file).measurements()
    assert (timed := counted[key].timing) and timed.seconds == pytest.approx(0.6 * base.seconds, rel=1e-3)
    own = source.measure(counted[other].configuration, 0).timing
    assert own is not None and counted[other].timing == own, "without turns its trial tells"
    assert key not in {one.configuration.key for _, group in Table(file).groups(1, 4) for one in group}, "it was done"


def test_the_truth_of_ratios_is_what_choices_do_and_no_luck() -> None:
    """Of 72 configurations, each seen twice with noise and with an error of its group."""
    rng = random.Random(0)
    effects: dict[Any, float] = {f"{lever}={choice}": rng.gauss(0.0, 0.1) for lever in "abc" for choice in range(6)}
    effects |= {pair: rng.gauss(0.0, SPREADS["pair"]) for pair in combinations(list(effects), 2)}
    names = [[f"a={a}", f"b={b}", f"c={c}"] for a in range(6) for b in range(4) for c in range(3)]
    choices = {"/".join(one): one for one in names}
    true = {
        key: math.exp(sum(effects[one] for one in (*mine, *combinations(mine, 2)))) for key, mine in choices.items()
    }

    def round_of() -> list[dict[str, float]]:
        keys, groups = rng.sample(sorted(true), len(true)), []
        for at in range(0, len(keys), 5):
            common = rng.gauss(0.0, SPREADS["group"])
            groups.append({key: true[key] * math.exp(common + rng.gauss(0.0, NOISE)) for key in keys[at : at + 5]})
        return groups

    groups = [*round_of(), *round_of()]
    means = dict.fromkeys(true, 0.0)
    for group in groups:
        for key, ratio in group.items():
            means[key] += math.log(ratio) / 2
    found = told(groups, choices)
    errors = [math.log(found[key] / true[key]) for key in true]
    plain = [means[key] - math.log(true[key]) for key in true]
    assert statistics.pstdev(errors) < 0.75 * statistics.pstdev(plain)
    assert true[min(found, key=lambda key: found[key])] < 1.03 * min(true.values())


def test_what_a_recorded_surface_tells_is_of_the_configuration_that_was_asked_for() -> None:
    """At a micro batch of its own, too: a search would ask for it again and again otherwise."""
    recorded = build("llama-lora-cpu")
    asked = valid(recorded.spec, recorded.facts, recorded.rows)[1].at_micro_batch(4)
    assert recorded.measure(asked, 0).configuration == asked


@pytest.mark.parametrize("name", tables())
def test_a_table_stays_complete_where_a_lever_comes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's trials had it at its baseline, so that nothing has to be measured again."""
    before = build(name)
    scores = sorted(before.true_score(one) for one in valid(before.spec, before.facts, before.rows))
    choices = (Choice("off", "as it is"), Choice("on", "otherwise", function="on"))
    monkeypatch.setitem(LEVERS, "new", Lever("new", "A new one.", choices, "off", "https://example.org", stage="model"))
    after = Recorded(TABLES / f"{name}.json")
    every = valid(after.spec, after.facts, after.rows)
    assert {one.levers["new"] for one in every} == {"off"} and after.fingerprint == before.fingerprint
    assert sorted(after.true_score(one) for one in every) == pytest.approx(scores, rel=1e-3)


def test_a_table_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    source = narrowed("synthetic-01", 1)
    file = tmp_path / "some-table.json"
    table = Table(file, source.spec, source.facts)
    count = len(valid(source.spec, source.facts, source.rows))
    table.add(source.measure(table.missing()[0], 0))
    assert len(Table(file).missing()) == count - 1
    for one in Table(file).missing():
        table.add(source.measure(one, 0))
    assert table.missing() == [] and len(table.measurements()) == count
    recorded = Recorded(file)
    assert {one.key for one in valid(source.spec, source.facts, source.rows)} == set(table.measurements())
    assert recorded.best == pytest.approx(source.best, rel=0.05)
    assert recorded.switches is not None and recorded.true_score(source.start) == pytest.approx(
        measured_score(source, source.start, 0)
    )


def test_a_simulated_gpus_job_ends_well_within_its_minutes() -> None:
    """One of those that benchmarks/simulated_gpu.py has a table of."""
    found = run("bert-24gib", 0, "quick")
    assert found["regret"] <= 0.05 and found["minutes"] <= found["minutes_given"] == 9
