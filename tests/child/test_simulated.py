"""What a trial measures, held to a device whose truth is known: the simulated GPU."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from service.contract.child import ChildMessage, ProbeDone, ProbeStarted
from service.contract.measurement import Probe
from service.contract.states import Origin, ProbePhase
from service.contract.task import TrialRequest
from tests.child import tiny
from training.errors import TrainingError
from worker.child import curve, probe, soak, timing, typical
from worker.child.arrange import plan_of, widest_first
from worker.child.build import Bundle
from worker.child.size_search import MOST_SIZES, EarlierProbes
from worker.child.timing import Unit, time_unit
from worker.child.warmup import warm
from worker.devices import discover, open_device
from worker.devices.facts import all_facts
from worker.devices.simulated import FULL_CLOCK, Simulated, Span, World

SLOW = World(flops=2e9, bandwidth=2e9)  # so slow that a tiny model keeps it busy
PLAIN = replace(SLOW, first_call_seconds=0.0, segment_seconds=0.0)
MIB = 1 << 20
Make = Callable[..., Unit]


@pytest.fixture
def unit(llama: Path, functions: Path) -> Make:
    """Makes the unit of a tiny Llama on a simulated GPU of its own, which is closed."""

    def make(world: World, micro: int = 4, **levers: Any) -> Unit:
        device = Simulated(world=world)
        try:
            bundle = tiny.bundle(tiny.job(llama, functions), "lora", device, **levers)
        finally:
            device.close()
        device.host = device.device = 0.0
        return Unit(bundle, micro, plan_of(bundle, list(range(16)), micro))

    return make


@pytest.fixture
def running() -> Iterator[Callable[[Unit], Any]]:
    """Lets a unit's device count, until the test is over."""
    entered: list[Any] = []

    def run(unit: Unit) -> Simulated:
        device = unit.bundle.device
        assert isinstance(device, Simulated)
        device.open()
        entered.append(device)
        return device

    yield run
    for device in reversed(entered):
        device.close()


def seconds(unit: Unit) -> float:
    """The unit's seconds by a timing as trials do it."""
    warm(unit)
    time_unit(unit, passes=2)
    return unit.timing().seconds


@pytest.fixture
def truth(unit: Make, running: Any) -> float:
    """What the unit takes where nothing is ever called for the first time."""
    made = unit(PLAIN)
    running(made)
    made.run()
    made.run()
    return made.timing().seconds


def test_it_is_no_users_device() -> None:
    assert "simulated" in discover() and all(one.device != "simulated" for one in all_facts())
    device = open_device("simulated")
    assert isinstance(device, Simulated) and device.has_own_memory
    device.close()


def test_first_calls_are_in_no_timing_and_told_apart(unit: Make, running: Any, truth: float) -> None:
    cold = unit(SLOW)
    running(cold)
    cold.run()
    assert cold.timing().seconds > 1.2 * truth, "what a timing without a warm-up would say"
    made = unit(SLOW)
    device = running(made)
    before = device.first_calls
    assert seconds(made) == pytest.approx(truth, rel=0.02)
    # Beside the first calls, a warm-up asks for memory, and its gradients are not accumulated.
    assert made.first_calls() == pytest.approx(device.first_calls - before, rel=0.15)


def test_a_device_that_waits_for_the_host_is_timed_as_it_is(unit: Make, running: Any) -> None:
    """Launches take longer than what they ask for: the host never runs ahead."""
    bound = replace(PLAIN, flops=1e15, bandwidth=1e15, launch_seconds=1e-4)
    made = unit(bound)
    device = running(made)
    made.run()
    began = device.host
    made.run()
    found = made.timing()
    assert found.seconds == pytest.approx(found.token_factor * (device.host - began), rel=0.02)


def test_what_is_clearly_slower_is_given_up_and_the_rest_is_predicted(
    unit: Make, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit of 20 micro batches of other lengths, of which a quarter is timed before it may be given up."""
    monkeypatch.setattr(typical, "token_factor", lambda *_: 1.0)

    def timed(most_seconds: float | None) -> Unit:
        made = unit(PLAIN)
        made.micro, made.plan = 2, plan_of(made.bundle, list(range(40)), 2)
        made.most_seconds = most_seconds
        running(made)
        warm(made)
        assert made.run()
        return made

    whole = timed(None)
    truth = whole.timing()
    monkeypatch.setattr(timing, "LEAST_TIMED_SECONDS", truth.seconds / 4)
    assert timed(1.02 * truth.seconds).passes == 1, "it is not slower than that"
    made = timed(0.95 * truth.seconds)
    found = made.timing()
    assert made.passes == found.passes == 0 and 0.2 < found.timed_share < 0.6 and truth.timed_share == 1.0
    assert found.seconds == pytest.approx(truth.seconds, rel=0.02)
    assert found.update_seconds == pytest.approx(truth.update_seconds, rel=0.02)
    same = ("samples", "tokens", "padded_tokens", "steps")
    assert [getattr(found, name) for name in same] == [getattr(truth, name) for name in same]
    assert len(made.losses) < len(whole.losses)


def test_nothing_is_given_up_for_what_the_model_cannot_tell(
    unit: Make, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are longer than all before them may be slower than any fit to these says."""
    monkeypatch.setattr(timing, "LEAST_TIMED_SECONDS", 0.0)
    made = rising(unit(PLAIN))
    made.most_seconds = 1e-9
    running(made)
    assert made.run() and made.passes == 1, "the longest come last"
    neighboured = unit(replace(PLAIN, others=(Span(0.0, 1e9, 0.5),)))
    neighboured.most_seconds = 1e-9
    running(neighboured)
    assert neighboured.run() and neighboured.passes == 1, "a neighbour made it slow"


def rising(made: Unit) -> Unit:
    """The unit with 5 steps of four micro batches, each at least as wide as all before it."""
    lengths = made.bundle.data.lengths
    samples = sorted(range(40), key=lambda sample: lengths[sample])
    assert lengths[samples[31]] < lengths[samples[39]]
    made.micro = 2
    made.plan = [[[[samples[at]], [samples[at + 1]]] for at in range(step, step + 8, 2)] for step in range(0, 40, 8)]
    return made


def ten_steps(made: Unit) -> Unit:
    """The unit with 10 steps of two micro batches, most of which have a width of their own, the widest step first."""
    made.micro = 2
    lengths = made.bundle.data.lengths
    samples = iter(range(40))
    plan = [[[[next(samples)], [next(samples)]] for _ in range(2)] for _ in range(10)]
    made.plan = widest_first(plan, lengths, made.bundle.recipe)
    widths = [max(lengths[row[0]] for micro in step for row in micro) for step in made.plan]
    assert widths[0] == max(widths) and sorted(map(str, plan)) == sorted(map(str, made.plan))
    return made


@pytest.mark.parametrize("limit", ["warm-up", "pass"])
def test_a_trial_of_a_large_model_times_the_first_steps_and_predicts_the_rest(
    unit: Make, running: Any, limit: str
) -> None:
    """What is timed ends with the shapes that were warmed up in time, or, where all were, when that is enough."""
    whole = ten_steps(unit(PLAIN))
    running(whole)
    assert whole.run()
    truth = whole.timing()
    made = ten_steps(unit(replace(PLAIN, first_call_seconds=truth.seconds / 100)))
    device = running(made)
    if limit == "pass":
        warm(made)
    made.enough_seconds = truth.seconds / 4
    if limit == "warm-up":
        warm(made)
        assert made.timed_steps is not None
    first_calls = device.first_calls
    assert made.run() and made.passes == 1 and device.first_calls == first_calls
    assert made.timed_steps is not None and 2 <= made.timed_steps <= 5, "two steps have four shapes at most"
    found = made.timing()
    assert found.timed_share == made.timed_steps / 10 and len(made.losses) == made.timed_steps
    assert found.seconds == pytest.approx(truth.seconds, rel=0.02)
    same = ("samples", "tokens", "padded_tokens", "steps")
    assert [getattr(found, name) for name in same] == [getattr(truth, name) for name in same]
    time_unit(made, passes=2, extra=0)
    assert made.passes >= 2 and len(made.losses) == made.passes * made.timed_steps, "later passes have the same steps"


def test_a_trial_on_a_gpu_says_how_much_of_its_unit_was_timed(
    unit: Make, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = unit(SLOW)
    running(made)
    made.bundle.configuration = asked = made.bundle.configuration.at_micro_batch(2)
    request = TrialRequest(configuration=asked, origin=Origin.recipe, number=2, curve=False, passes=1)
    monkeypatch.setattr(curve, "ENOUGH_SECONDS", 1e-9)
    trial = curve.Curve(made.bundle, list(range(32)), request, lambda _: None, time.perf_counter())
    best = trial.run(probe.largest(made.bundle, lambda _: None, False, EarlierProbes((), None)))
    share = best.timing().timed_share
    assert 0 < share < 1 and best.passes >= 1
    assert trial.notes == [f"{share:.0%} of the work unit was timed, which tells what the rest takes."]


@pytest.mark.parametrize(("least", "enough", "passes"), [(1e-9, 1e9, 5), (1e9, 1e9, 7), (1e9, 1e-9, 1)])
def test_a_quick_trial_of_few_short_steps_is_timed_until_it_tells(
    unit: Make, running: Any, monkeypatch: pytest.MonkeyPatch, least: float, enough: float, passes: int
) -> None:
    """One pass of two steps is asked for: it trains ten, and for LEAST_TIMED_SECONDS, but not for ever, and no longer
    than ENOUGH_SECONDS."""
    made = unit(PLAIN)
    running(made)
    monkeypatch.setattr(timing, "LEAST_TIMED_SECONDS", least)
    monkeypatch.setattr(timing, "ENOUGH_SECONDS", enough)
    monkeypatch.setattr(timing, "MOST_PASSES", 7)
    monkeypatch.setattr(curve, "ENOUGH_SECONDS", 1e9)
    made.bundle.configuration = asked = made.bundle.configuration.at_micro_batch(4)
    request = TrialRequest(configuration=asked, origin=Origin.recipe, number=2, curve=False, passes=1)
    trial = curve.Curve(made.bundle, list(range(16)), request, lambda _: None, time.perf_counter())
    best = trial.run(probe.largest(made.bundle, lambda _: None, False, EarlierProbes((), None)))
    assert len(best.plan) == 2 and best.passes == passes and best.timing().passes == passes


def test_no_shape_is_warmed_up_after_the_deadline(unit: Make, running: Any) -> None:
    made = ten_steps(unit(SLOW))
    running(made)
    made.enough_seconds = 1e9
    warm(made, deadline=0.0)
    assert len(made.warmed) == 1


def test_all_of_a_unit_is_timed_where_its_first_steps_do_not_tell_of_the_rest(unit: Make, running: Any) -> None:
    made = rising(unit(PLAIN))
    running(made)
    made.enough_seconds = 1e-9
    warm(made)
    assert made.timed_steps is None and made.run() and made.timing().timed_share == 1
    small = ten_steps(unit(PLAIN))
    running(small)
    small.enough_seconds = 1e9
    warm(small)
    assert small.timed_steps is None and small.run() and small.timing().timed_share == 1, "it does not take long"


@pytest.mark.parametrize("kind", ["others", "throttled"])
def test_disturbed_timings_are_repeated(unit: Make, running: Any, truth: float, kind: str) -> None:
    disturbed: dict[str, Any] = {kind: (Span(truth * 1.5, truth * 3.0, 0.5),)}
    made = unit(replace(SLOW, first_call_seconds=0.0, **disturbed))
    running(made)
    assert seconds(made) == pytest.approx(truth, rel=0.02)
    assert made.pieces.dirty, "some were disturbed"
    clocks = made.timing().clock_mhz
    assert clocks is not None and (clocks[0] < FULL_CLOCK) == (kind == "throttled")
    assert made.timing().slowed_by == (("heat",) if kind == "throttled" else ())


def test_peaks_change_nothing_between_steps(unit: Make, running: Any) -> None:
    """Reading a peak asks nothing of the device: the step after it needs no new segment."""
    made = unit(SLOW)
    device = running(made)
    made.run()
    calls = device.memory.calls
    device.reset_peak()
    made.run()
    assert device.memory.calls == calls
    device.empty_cache()
    made.run()
    assert device.memory.calls > calls


def ever_larger(unit: Unit) -> None:
    """Each forward pass needs a buffer that no cached segment has room for."""
    sizes = iter(range(20, 1000, 2))

    def buffer(*_: Any) -> None:
        torch.ones(next(sizes) * MIB, dtype=torch.uint8)

    unit.bundle.model.register_forward_pre_hook(buffer)


def test_retries_are_counted_in_timings(unit: Make, running: Any) -> None:
    made = unit(SLOW)
    device = running(made)
    made.run()
    assert made.timing().retries == 0
    device.limit(device.peak() + 40 * MIB)
    ever_larger(made)
    made.run()
    assert made.timing().retries > 0


def test_a_soak_whose_memory_is_ever_full_does_not_pass(unit: Make, running: Any) -> None:
    made = unit(SLOW)
    device = running(made)
    made.run()
    device.limit(device.peak() + 100 * MIB)
    ever_larger(made)
    with pytest.raises(TrainingError, match="two steps running"):
        soak.soak(made.bundle, 4, 40, 0, 4, 600.0)


@pytest.mark.parametrize(
    ("precision", "batching", "length", "mebibytes", "least"),
    [("fp32", "packed", 96, 120, 1), ("fp32", "padded", 96, 300, 1), ("bf16-mixed", "padded", 64, 349, 50)],
)
def test_the_probe_finds_what_a_caching_allocator_holds(
    llama: Path, tmp_path: Path, precision: str, batching: str, length: int, mebibytes: int, least: int
) -> None:
    """At most two samples below the truth, although segments are coarse beside so little memory; never above it.

    The last case holds `least` samples and more only because the allocator frees its cache: by their peaks 46 fit.
    """
    rows = tiny.write(tmp_path / "rows.jsonl", tiny.pairs(200))
    job = tiny.job(llama, rows, max_length=length, training={"effective_batch_size": 64})

    @contextlib.contextmanager
    def child() -> Iterator[Bundle]:
        device = Simulated(world=SLOW)
        device.limit(mebibytes * MIB)
        try:
            yield tiny.bundle(job, "lora", device, 64, precision=precision, batching=batching)
        finally:
            device.close()

    probes: list[Probe] = []
    begun: list[int] = []

    def tell(message: ChildMessage) -> None:
        if isinstance(message, ProbeStarted):
            begun.append(message.micro_batch_size)
        elif isinstance(message, ProbeDone):
            probes.append(message.probe)

    found = None
    while found is None:  # a child that runs out of memory is followed by another, which knows its probes
        with child() as bundle:
            try:
                found = probe.largest(bundle, tell, known=EarlierProbes(tuple(probes)))
            except torch.OutOfMemoryError:
                probes.append(Probe(micro_batch_size=begun[-1], peak_bytes=None, phase=ProbePhase.training))
    assert found.limited_by == "memory" and len(probes) <= MOST_SIZES and found.largest >= least
    assert least == 1 or (found.line is not None and found.line.largest(mebibytes * MIB) == 46)

    def steps_held(size: int) -> bool:
        with child() as bundle:
            try:
                for micro in (1, size, size, size):
                    probe.full_step(bundle, micro)
            except torch.OutOfMemoryError:
                return False
        return True

    assert steps_held(found.largest) and not steps_held(found.largest + 3)


def test_medians_hide_nothing_steady(unit: Make, running: Any, truth: float) -> None:
    """Every pass over the unit takes the same, to a thousandth."""
    made = unit(PLAIN)
    running(made)
    made.run()
    times = []
    for _ in range(3):
        fresh = Unit(made.bundle, made.micro, made.plan)
        fresh.run()
        times.append(fresh.timing().seconds)
    assert statistics.pstdev(times) < 1e-3 * truth
