"""The soak: what it runs, that it goes on where it was, and that a leak does not pass."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from service.contract.job import JobSpec
from service.contract.task import EVALUATED
from service.levers import LEVERS
from tests.child import tiny
from tests.factory import configuration, measured, timing
from training.errors import TrainingError
from training.samples import Samples
from worker.child import drift, soak, steps
from worker.child.arrange import shape_of
from worker.child.build import Bundle

EFFECTIVE = 4


@pytest.fixture
def bundle(llama: Path, tmp_path: Path) -> Bundle:
    data = tiny.write(tmp_path / "rows.jsonl", tiny.pairs(60, most=40))
    training = {"effective_batch_size": EFFECTIVE}
    spec = tiny.job(llama, data, max_length=32, training=training, search={"verify": "quick"})
    return tiny.bundle(spec, "lora", effective=EFFECTIVE)


@pytest.mark.parametrize("batching", LEVERS["batching"].names)
def test_the_longest_come_first_and_again_after_the_save(bundle: Bundle, batching: str) -> None:
    """By what their micro batches compute: where a batching shuffles these, the longest sample may be in any."""
    asked = bundle.spec.model_copy(update={"training": bundle.spec.training.model_copy(update={"seed": 2})})
    bundle = tiny.bundle(asked, "lora", effective=16, batching=batching)
    lengths = [32 if at == 37 else 4 + at % 9 for at in range(len(bundle.data.lengths))]
    bundle.data = dataclasses.replace(bundle.data, lengths=lengths)
    plan, middle = soak.soak_plan(bundle, 2, 12, seed=0)
    sizes = [
        sorted(math.prod(shape_of(micro, bundle.data.lengths, bundle.recipe)) for micro in step)[-2:] for step in plan
    ]
    assert 10 <= len(plan) <= 12 and 4 <= middle <= 8
    assert sizes[0] == sizes[middle] and sizes[0][-1] == max(one[-1] for one in sizes)
    assert sizes[0][0] >= max(one[0] for one in sizes), "two such micro batches, not one"
    assert sum(sizes[middle - 1]) == min(sum(one) for one in sizes if len(one) == 2)


def test_it_certifies_what_was_run(bundle: Bundle, tmp_path: Path) -> None:
    soak.soak(bundle, 2, 40, 0, 4, 600.0)  # what libraries keep for each shape is there from now on
    found = soak.soak(bundle, 2, 40, 0, 4, 600.0, tmp_path / "soak.json")
    assert (found.steps, found.wanted_steps, found.segments, found.worst_case_steps) == (40, 40, 1, 2)
    assert found.evaluation_loss and found.saved_bytes and found.peak_bytes and found.last_loss
    assert found.growth_bytes is not None and abs(found.growth_bytes) < drift.NOISE_BYTES


def test_a_full_disk_says_nothing_of_a_configuration(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=soak.LEFT_FREE + 100))
    assert soak.soak(bundle, 2, 2, 0, 4, 600.0).saved_bytes == 0


@pytest.mark.parametrize("steps", [1, 2])
def test_a_short_soak_ran_the_longest_once(bundle: Bundle, steps: int) -> None:
    assert soak.soak(bundle, 2, steps, 0, 4, 600.0).worst_case_steps == 1


@pytest.mark.parametrize(
    ("verify", "step", "steps"), [("quick", 5.0, 40), ("strict", 5.0, 1000), ("quick", 0.7, 43), ("quick", 1e-4, 5000)]
)
def test_a_soak_takes_half_a_minute_and_has_enough_steps(
    spec: Callable[..., JobSpec], verify: str, step: float, steps: int
) -> None:
    """Of fast steps so many fit into that time that some are left out."""
    candidate = measured(configuration(), timing=timing(2 * step))
    assert soak.steps_of(spec(search={"verify": verify}), candidate) == steps
    untimed = soak.steps_of(spec(search={"verify": verify}), measured(configuration(), timing=None))
    assert untimed == soak.SOAK_STEPS[verify]


def test_a_soak_without_time_evaluates_and_trains_a_step(bundle: Bundle) -> None:
    """It tells how few steps it had; the evaluation is as likely to fail as any of them."""
    found = soak.soak(bundle, 2, 30, 0, 4, 0.0)
    assert (found.steps, found.wanted_steps, found.worst_case_steps) == (1, 30, 1)
    assert found.evaluation_loss and found.saved_bytes
    assert found.evaluation_rows == min(len(bundle.data.validation), EVALUATED["quick"]) and found.growth_bytes is None


def test_the_peak_of_a_soak_is_that_of_its_largest_step(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([500, 900, *[300] * 10])
    monkeypatch.setattr(bundle.device, "peak", lambda: next(peaks))
    assert soak.soak(bundle, 2, 6, 0, 4, 600.0).peak_bytes == 900


@pytest.mark.parametrize(("share", "counted"), [(None, 12), (0.0, 12), (1.0, 0)])
def test_steps_beside_others_say_nothing_of_the_pace(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, share: float | None, counted: int
) -> None:
    """A neighbour that begins in the last third of a soak makes no configuration slower."""
    counts: list[int] = []

    def steady(paces: list[float]) -> bool:
        counts.append(len(paces))
        return False

    monkeypatch.setattr(bundle.device, "others_share", lambda *_: share)
    monkeypatch.setattr(drift, "slowing", steady)
    soak.soak(bundle, 2, 12, 0, 4, 600.0)
    assert counts == [counted]


@pytest.mark.parametrize("loss", [None, math.nan, math.inf])
def test_an_evaluation_without_a_finite_loss_does_not_pass(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, loss: float | None
) -> None:
    monkeypatch.setattr("training.evaluation.evaluate", lambda *_: {"loss": loss})
    with pytest.raises(TrainingError, match=f"the evaluation loss is {loss}"):
        soak.evaluate(bundle, 2)


def test_a_soak_that_goes_on_knows_its_evaluation_and_its_peak(tmp_path: Path) -> None:
    """The memory of its steps is that of a process that has ended."""
    seen = soak.Evaluation(2.5, 0.5, 1.0, {"bleu": 30.0})
    state = soak.State(40, done=20, segments=1, peak=900, evaluation=seen, saved=7, live=[1, 2, 3])
    state.save(tmp_path / "folder" / "soak.json")
    assert soak.State.load(tmp_path / "folder" / "soak.json", 40) == dataclasses.replace(state, live=[])
    assert soak.State.load(tmp_path / "folder" / "soak.json", 41) == soak.State(41)
    assert soak.State.load(tmp_path / "none.json", 40) == soak.State.load(None, 40) == soak.State(40)


def test_a_state_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "soak.json").write_text('{"steps": 40, "done": 7, "worst_case_steps": 1}')
    assert soak.State.load(tmp_path / "soak.json", 40).done == 7


@pytest.mark.parametrize(("objective", "peak"), [("memory", 900), ("wall-clock", 500)])
def test_a_search_for_memory_counts_what_the_evaluation_takes(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, objective: str, peak: int
) -> None:
    """Elsewhere its batch is the largest that fits, so that it says nothing of training."""
    search = bundle.spec.search.model_copy(update={"objective": objective})
    job, evaluate, now = bundle.spec.model_copy(update={"search": search}), soak.evaluate, [0]
    monkeypatch.setattr(bundle.device, "reset_peak", lambda: now.append(500))
    monkeypatch.setattr(bundle.device, "peak", lambda: now[-1])

    def evaluated(*asked: Any) -> Any:
        now.append(900)
        return evaluate(*asked)

    monkeypatch.setattr(soak, "evaluate", evaluated)
    assert soak.soak(dataclasses.replace(bundle, spec=job), 2, 8, 0, 4, 600.0).peak_bytes == peak


def test_an_interrupted_one_goes_on(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, ran, step = tmp_path / "soak.json", [], soak._step

    def broken(bundle: Bundle, plan: Any, number: int, state: Any) -> None:
        if number == 25 and 25 not in ran:
            ran.append(number)
            raise KeyboardInterrupt
        ran.append(number)
        step(bundle, plan, number, state)

    monkeypatch.setattr(soak, "_step", broken)
    with pytest.raises(KeyboardInterrupt):
        soak.soak(bundle, 2, 30, 0, 4, 600.0, file)
    found = soak.soak(bundle, 2, 30, 0, 4, 600.0, file)
    assert found.steps == 30 and found.segments == 2
    assert ran.index(25) < ran.index(20, ran.index(25)), "it goes on from the last 20 that were written down"
    assert ran.count(19) == 1
    assert soak.soak(bundle, 2, 12, 0, 4, 600.0, file).segments == 1, "a soak of other steps begins anew"


def test_a_leak_does_not_pass(bundle: Bundle) -> None:
    """A model that keeps 1 MB a step."""
    kept: list[torch.Tensor] = []
    bundle.model.register_forward_hook(lambda *_: kept.append(torch.ones(1 << 17, device=tiny.DEVICE)))
    with pytest.raises(TrainingError, match=r"keeps growing, by (0\.9|1\.0)\d MiB a step"):
        soak.soak(bundle, 2, 200, 0, 4, 600.0)


def test_rising_retries_do_not_pass(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(10_000))
    monkeypatch.setattr(bundle.device, "retries", lambda: next(count), raising=False)
    with pytest.raises(TrainingError, match="two steps running"):
        soak.soak(bundle, 2, 30, 0, 4, 600.0)


@pytest.mark.parametrize(("rises", "passes"), [({3, 5, 7, 9}, True), ({3, 4}, False)], ids=["now and then", "twice"])
def test_a_cache_may_be_freed_now_and_then_and_not_on_two_steps_running(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, rises: set[int], passes: bool
) -> None:
    step, freed = soak._step, [0]

    def freeing(made: Bundle, prepared: Any, number: int, state: soak.State) -> None:
        freed[0] += number in rises
        step(made, prepared, number, state)

    monkeypatch.setattr(soak, "_step", freeing)
    monkeypatch.setattr(bundle.device, "retries", lambda: freed[0], raising=False)
    if passes:
        assert soak.soak(bundle, 2, 12, 0, 4, 600.0).retries == len(rises)
    else:
        with pytest.raises(TrainingError, match=r"two steps running \(step 4\)"):
            soak.soak(bundle, 2, 12, 0, 4, 600.0)


def test_a_loss_that_is_not_a_number_does_not_pass(bundle: Bundle) -> None:
    with torch.no_grad():
        next(one for one in bundle.model.parameters() if one.requires_grad).fill_(float("nan"))
    with pytest.raises(TrainingError, match="step 0 went wrong: its loss is nan"):
        soak.soak(bundle, 2, 30, 0, 4, 600.0)


@pytest.mark.parametrize(
    ("live", "grows"),
    [
        ([100 << 20] * 60, False),
        ([(100 << 20) + step * (1 << 20) for step in range(60)], True),
        ([(100 << 20) + min(step, 25) * (1 << 20) for step in range(60)], False),
        ([(100 << 20) + (step % 7) * (8 << 20) for step in range(60)], False),
        ([(100 << 20) + step * (1 << 16) for step in range(60)], False),
        ([100 << 20] * 40 + [150 << 20] * 20, False),
        ([100 << 20] * 20 + [140 << 20] * 20 + [150 << 20] * 20, False),
        ([100 << 20] * 20 + [105 << 20] * 20 + [108 << 20] * 20, False),
    ],
    ids=["flat", "leak", "levels off", "noise", "within noise", "one jump", "levels off slowly", "noise at the end"],
)
def test_growth(live: list[int], grows: bool) -> None:
    assert (drift.growth(live) > 0) == grows


@pytest.mark.parametrize("leaks", [True, False], ids=["leak", "new shapes"])
def test_growth_counts_where_nothing_new_is_run(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, leaks: bool) -> None:
    """Memory that rises with each step, or with each step of a shape that was not seen: only a leak ends the soak."""
    seen: set[int] = set()
    used, ran = 100 << 20, 0

    def step(_bundle: Bundle, prepared: Any, number: int, state: soak.State) -> None:
        nonlocal used, ran
        ran += 1
        if leaks or id(prepared) not in seen:
            used += 5 << 20
        seen.add(id(prepared))
        kept.append(prepared)  # so that no other gets its id
        state.done = number + 1
        state.losses.append(1.0)
        state.live.append(used)

    kept: list[Any] = []
    monkeypatch.setattr(soak, "_step", step)
    monkeypatch.setattr(drift, "slowing", lambda paces: False)  # these steps take microseconds, which tell nothing
    if leaks:
        with pytest.raises(TrainingError, match="by 5.00 MiB a step while one step is repeated"):
            soak.soak(bundle, 2, 40, 0, 4, 600.0)
    else:
        assert soak.soak(bundle, 2, 40, 0, 4, 600.0).steps == 40
        assert ran == 40 + soak.LEAST_REPEATS


@pytest.mark.parametrize("every", [10, 25, 40])
def test_a_leak_may_grow_in_jumps(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """A dozen repeats of a step need not hold a jump, and then what was seen before was forgotten."""
    used, ran = 100 << 20, 0

    def step(_bundle: Bundle, prepared: Any, number: int, state: soak.State) -> None:
        nonlocal used, ran
        ran += 1
        used += (100 << 20) if ran % every == 0 else 0
        state.done = number + 1
        state.losses.append(1.0)
        state.live.append(used)

    monkeypatch.setattr(soak, "_step", step)
    monkeypatch.setattr(drift, "slowing", lambda paces: False)
    with pytest.raises(TrainingError, match="MiB a step while one step is repeated"):
        soak.soak(bundle, 2, 200, 0, 4, 600.0)


def test_the_longest_pause_is_between_two_maxima() -> None:
    assert drift.longest_pause([1, 2, 2, 2, 3, 4, 4]) == 2 and drift.longest_pause([3, 2, 1, 2]) == 3
    assert drift.longest_pause([]) == 0


def test_losses_are_told_by_fifths_of_the_steps() -> None:
    assert drift.fifths([5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 2.0, 9.0, 1.0, 2.0]) == [5.0, 4.0, 3.0, 5.5, 1.5]
    assert drift.fifths([3.0, 2.0]) == [3.0, 2.0]


def test_a_step_can_be_repeated(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real step holds no more memory when it is repeated; the same step with 2 MiB that it keeps does."""
    plan, _ = soak.soak_plan(bundle, 2, 1, seed=0)
    prepared, step = next(steps.prepared(bundle, plan)), steps.optimizer_step
    kept: list[torch.Tensor] = []

    def leaking(*arguments: Any) -> Any:
        kept.append(torch.ones(2 << 20, dtype=torch.uint8, device=bundle.device.torch))
        return step(*arguments)

    soak.confirm_growth(bundle, prepared, 0, pace=1 << 20)
    monkeypatch.setattr(steps, "optimizer_step", leaking)
    with pytest.raises(TrainingError, match=r"by (1\.9|2\.0)\d MiB a step while one step is repeated"):
        soak.confirm_growth(bundle, prepared, 0, pace=1 << 20)
    assert len(kept) == soak.LEAST_REPEATS


def test_steps_that_seem_to_become_slower() -> None:
    steady = [1.0, 1.1, 0.9, 1.0, 1.2] * 5
    assert not drift.slowing(steady)
    assert not drift.slowing([one * (1 + at / 100) for at, one in enumerate(steady)])
    assert drift.slowing([one * (1 if at < 8 else 2) for at, one in enumerate(steady)])
    assert not drift.slowing([1.0] * 4 + [2.0] * 8), "too few to tell"
    assert drift.slowing([1.0] * 5 + [1.5] * 5 + [2.0] * 5), "just enough"


@pytest.mark.parametrize("slows", [True, False], ids=["slower", "other shapes"])
def test_steps_are_slower_where_the_same_ones_are(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, slows: bool) -> None:
    """A clock that goes on by more at each step, or by more a token where a step is short: only the former fails."""
    now, ran = [0.0], [0]

    def step(_bundle: Bundle, prepared: Any, number: int, state: soak.State) -> None:
        ran[0] += 1
        tokens = sum(batch["input_ids"].numel() for batch in prepared[0])
        now[0] += tokens * (1 + ran[0] / 10) if slows else tokens
        state.done = number + 1
        state.losses.append(1.0)
        state.live.append(0)

    monkeypatch.setattr(soak, "_step", step)
    monkeypatch.setattr(drift, "slowing", lambda paces: True)
    monkeypatch.setattr(soak, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(bundle.device, "others_share", lambda *_: 0.0)
    if slows:
        with pytest.raises(TrainingError, match=r"times slower over 40 steps"):
            soak.soak(bundle, 2, 40, 0, 4, 1e9)
    else:
        assert soak.soak(bundle, 2, 40, 0, 4, 1e9).steps == 40


def test_steps_that_were_slow_for_a_while_only_are_sound(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour that the device cannot see slows a soak's end and the first repeats, and is gone after a pause."""
    now, paused = [0.0], [False]

    def step(_bundle: Bundle, prepared: Any, number: int, state: soak.State) -> None:
        slow = number >= 20 and not paused[0]
        now[0] += sum(batch["input_ids"].numel() for batch in prepared[0]) * (2 if slow else 1)
        state.done = number + 1
        state.losses.append(1.0)
        state.live.append(0)

    def sleep(seconds: float) -> None:
        paused[0] = seconds == soak.PAUSE_SECONDS

    monkeypatch.setattr(soak, "_step", step)
    monkeypatch.setattr(drift, "slowing", lambda paces: True)
    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(bundle.device, "others_share", lambda *_: None)
    assert soak.soak(bundle, 2, 40, 0, 4, 1e9).steps == 40 and paused[0]


def test_the_longest_validation_samples_are_evaluated(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """They fill a batch, wherever in the validation data they are; the scores are those of the first samples."""
    short, long = ((array("i", [1] * length), array("i", [1] * length)) for length in (4, 30))
    validation, widths = Samples([*[short] * 300, *[long] * 3]), list[list[int]]()
    monkeypatch.setattr(bundle, "data", dataclasses.replace(bundle.data, validation=validation))

    def seen(_: Any, samples: list[Any], *__: Any) -> dict[str, float]:
        widths.append([len(ids) for ids, _ in samples])
        return {"loss": float(len(widths))}

    monkeypatch.setattr("training.evaluation.evaluate", seen)
    assert soak.evaluate(bundle, 2).loss == 2.0
    assert widths == [[30, 30], [4] * EVALUATED["quick"]]
