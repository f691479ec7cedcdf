"""The search for the largest batch against made-up memory: no device, so that every shape of it can be tried."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from service.contract.child import ChildMessage, ProbeDone, ProbeStarted
from service.contract.measurement import MemoryLine, Probe
from service.contract.states import ProbePhase
from worker.child import probe
from worker.child.size_search import MOST_SIZES, EarlierProbes, Search, StepPeaks

CAPACITY = 3 << 30
Memory = Callable[[int], tuple[float, float]]


class Short(Exception):
    """Memory ran out."""


@dataclass
class Machine:
    """A device whose step of `micro` needs `memory(micro)`: (forward and backward, update), in bytes.

    Where the former is more than there is, freeing the cache leaves `unfreeable(micro)` of it, in the first step alone.
    """

    memory: Memory
    rest: float = 100e6
    thrashes_above: int = 10**9
    settles: bool = False  # steps that follow one with retries have none
    unfreeable: Callable[[int], float] | None = None
    rounding: float = 0.0  # bytes more than `unfreeable` says, where the cache was freed
    begun: list[int] = field(default_factory=list)
    told: list[Probe] = field(default_factory=list)
    retried: int = 0

    gains_from_large_batches = False

    def capacity(self) -> int:
        return CAPACITY

    def used(self) -> int:
        return int(self.rest)

    def empty_cache(self) -> None:
        return None

    def reset_peak(self) -> None:
        return None

    def reserved(self) -> None:
        return None

    def exact_memory(self, on: bool) -> None:
        return None

    def retries(self) -> int:
        return self.retried

    def step(self, _: Any, micro: int, from_empty: bool) -> StepPeaks:
        step, update = self.memory(micro)
        unfreeable = self.unfreeable(micro) if self.unfreeable else step
        self.retried += micro > self.thrashes_above and (from_empty or not self.settles)
        if step > CAPACITY:
            self.retried += from_empty
            step = unfreeable + self.rounding
        if max(step, update) > CAPACITY:
            raise Short
        return StepPeaks(int(step), int(update), int(unfreeable))

    def send(self, message: ChildMessage) -> None:
        if isinstance(message, ProbeStarted):
            self.begun.append(message.micro_batch_size)
        elif isinstance(message, ProbeDone):
            self.told.append(message.probe)

    def search(
        self,
        known: EarlierProbes = EarlierProbes(),  # noqa: B008 - it is frozen
        limit: int = 10**6,
        phase: ProbePhase = ProbePhase.training,
    ) -> Search:
        bundle: Any = SimpleNamespace(device=self)
        beyond = self.unfreeable is not None
        return Search(bundle, phase, self.step, (limit, "bound"), self.send, known, beyond)

    def find(self, limit: int = 10**6, line: MemoryLine | None = None) -> tuple[int, str, int]:
        """As a worker does: a child after each shortage. (largest, limited by, shortages)"""
        short = 0
        known: list[Probe] = []
        while True:
            search = self.search(EarlierProbes(tuple(known), line), limit)
            before = len(self.told)
            try:
                found = search.search()
            except Short:
                short += 1
                known += [*self.told[before:], Probe(micro_batch_size=self.begun[-1], peak_bytes=None)]
                continue
            return found.largest, found.limited_by, short


def true(memory: Callable[[int], tuple[float, ...]]) -> int:
    """The largest that fits."""
    micro = 0
    while max(memory(micro + 1)) <= CAPACITY:
        micro += 1
    return micro


def close(found: int, most: int) -> bool:
    """As the promise goes: never above; 0.97 of it, or one less."""
    return found <= most and (found >= 0.97 * most or found >= most - 1)


@pytest.mark.parametrize("seed", range(40))
def test_affine_memory_takes_few_sizes_and_never_runs_out(seed: int) -> None:
    rng = random.Random(seed)
    rest, slope = rng.uniform(1e8, 2e9), 10 ** rng.uniform(6, 8.7)
    update = rng.uniform(0, 2e9)
    memory: Memory = lambda micro: (rest + slope * micro, update)  # noqa: E731
    machine = Machine(memory, rest)
    found, limited_by, short = machine.find()
    assert close(found, true(memory)), (found, true(memory), machine.begun)
    assert limited_by == "memory" and short == 0 and len(set(machine.begun)) <= 4


@pytest.mark.parametrize("seed", range(40))
def test_noisy_and_bent_memory_runs_out_once_at_most(seed: int) -> None:
    """Two parts in a thousand of noise, and a term that grows a little faster than the batch."""
    rng = random.Random(seed)
    rest, slope = rng.uniform(1e8, 1e9), 10 ** rng.uniform(6.5, 8.5)
    bend = rng.uniform(-0.03, 0.03) * slope * slope / (CAPACITY - rest)
    memory: Memory = lambda micro: (  # noqa: E731
        rest + slope * micro + bend * micro**2 + random.Random(micro).uniform(-2e-3, 2e-3) * CAPACITY,
        0.0,
    )
    machine = Machine(memory, rest)
    found, _, short = machine.find()
    assert close(found, true(memory)), (found, true(memory), machine.begun)
    assert short <= 1 and len(machine.begun) <= MOST_SIZES


def test_a_large_update_does_not_hide_the_line() -> None:
    """Full finetuning: at small batches the optimizer's temporaries are the peak; forward and backward still grow."""
    memory: Memory = lambda micro: (3e8 + 4e7 * micro, 2.5e9)  # noqa: E731
    machine = Machine(memory, 3e8)
    found, _, short = machine.find()
    assert close(found, true(memory)) and short == 0


def test_after_a_shortage_the_next_child_goes_on_from_what_is_known() -> None:
    """A step in the middle: past 30 samples a library takes 6% of the memory more."""
    memory: Memory = lambda micro: (2e8 + 6e7 * micro + (2e8 if micro > 30 else 0.0), 0.0)  # noqa: E731
    machine = Machine(memory, 2e8)
    found, limited_by, short = machine.find()
    assert found <= true(memory) and found >= 0.9 * true(memory) and limited_by == "memory"
    assert 1 <= short <= 2 and machine.begun.count(1) == 1, "what ran before is not run again"


def test_one_size_of_an_earlier_child_is_run_again_before_the_line_goes_on() -> None:
    """Another phase ran out of memory there: this one is known to fit at 2, and nothing else."""
    machine = Machine(lambda micro: (100e6 + 50e6 * micro, 120e6))
    bundle = SimpleNamespace(device=machine)
    probes = (Probe(micro_batch_size=2, peak_bytes=200_000_000, update_bytes=120_000_000),)
    search = Search(bundle, ProbePhase.training, machine.step, (1000, "bound"), machine.send, EarlierProbes(probes))  # type: ignore[arg-type]
    found = search.search(confirm=False)
    assert machine.begun[0] == 2 and found.predicted <= true(machine.memory)


def test_nothing_fits() -> None:
    machine = Machine(lambda micro: (4e9, 0.0))
    found, limited_by, short = machine.find()
    assert (found, limited_by, short) == (0, "memory", 1) and machine.begun == [1]


def test_a_bound_is_named() -> None:
    machine = Machine(lambda micro: (1e8 + 1e6 * micro, 0.0))
    assert machine.find(limit=32)[:2] == (32, "bound") and len(machine.begun) <= 3
    one = Machine(lambda micro: (1e8 + 1e6 * micro, 0.0))
    assert one.find(limit=1)[:2] == (1, "bound") and one.begun == [1]


@pytest.mark.parametrize("wrong", [0.5, 0.8, 1.0, 1.3, 2.0])
def test_a_line_of_an_earlier_trial_saves_sizes(wrong: float) -> None:
    memory: Memory = lambda micro: (2e8 + 3e7 * micro, 0.0)  # noqa: E731
    machine = Machine(memory, 2e8)
    hint = MemoryLine(rest_bytes=2e8, slope_bytes=3e7 * wrong)
    found, _, short = machine.find(line=hint)
    assert close(found, true(memory)) and short == 0
    assert len(machine.begun) <= (2 if wrong >= 0.8 else 3)


def test_retries_that_do_not_end_step_down() -> None:
    memory: Memory = lambda micro: (2e8 + 3e7 * micro, 0.0)  # noqa: E731
    machine = Machine(memory, 2e8, thrashes_above=80)
    found, limited_by, short = machine.find()
    assert 70 <= found <= 80 and limited_by == "allocator retries" and short == 0


@pytest.mark.parametrize("phase", [ProbePhase.training, ProbePhase.compiled])
def test_one_sample_that_frees_the_cache_in_every_step_has_run_out_of_memory(phase: ProbePhase) -> None:
    machine = Machine(lambda micro: (9e8, 0.0), 2e8, thrashes_above=0)
    with pytest.raises(torch.OutOfMemoryError, match="one sample makes the allocator free its cache in every step"):
        machine.search(phase=phase).search(first=1)
    assert machine.search(phase=ProbePhase.evaluation).search(first=1).largest == 0, "it evaluates one in any case"


def test_a_size_whose_first_steps_alone_retry_fits_and_is_the_last() -> None:
    """Its peak is smaller than the line says, as something was freed within the step: no line goes through it."""
    memory: Memory = lambda micro: (2e8 + 3e7 * micro - 2e8 * (micro > 80), 0.0)  # noqa: E731
    machine = Machine(memory, 2e8, thrashes_above=80, settles=True)
    found = machine.search().search()
    assert found.largest == found.predicted == machine.begun[-1] > 80 and found.limited_by == "memory"


def test_a_later_child_does_not_take_a_size_that_frees_the_cache_in_every_step() -> None:
    """A trial's next child, after an evaluation ran out of memory for instance, knows what the one before has seen."""
    machine = Machine(lambda micro: (2e8 + 2e7 * micro, 0.0), 2e8, thrashes_above=80)
    found = machine.search().search()
    assert any(one.thrashes for one in machine.told) and found.largest == found.predicted <= 80
    again = machine.search(EarlierProbes(tuple(machine.told))).search()
    assert again.largest == found.largest and again.limited_by == found.limited_by == "allocator retries"


@pytest.mark.parametrize("seed", range(40))
def test_sizes_that_fit_once_the_cache_was_freed_are_found(seed: int) -> None:
    """What cannot be freed grows by 75% to 100% of what the peaks grow by, and is rounded up to segments."""
    rng = random.Random(seed)
    rest, slope = rng.uniform(1e8, 1e9), 10 ** rng.uniform(6.5, 7.7)
    share, rounding = rng.uniform(0.75, 1.0), rng.uniform(0, 0.01) * CAPACITY
    machine = Machine(
        lambda micro: (rest + slope * micro, 0.0), rest, unfreeable=lambda micro: rest + share * slope * micro
    )
    machine.rounding = rounding
    most = max(true(machine.memory), true(lambda micro: (rest + share * slope * micro + rounding,)))
    found, limited_by, short = machine.find()
    assert found <= most and (found >= 0.97 * most or found >= most - 2), (found, most, machine.begun)
    assert limited_by == "memory" and short == 0 and len(set(machine.begun)) <= MOST_SIZES


def test_where_freeing_helps_less_than_expected_it_runs_out_once_at_most() -> None:
    """What fits is what the peaks say and nothing larger, although by the counters half of it could be freed."""
    memory: Memory = lambda micro: (1e8 + 3e7 * micro, 0.0)  # noqa: E731
    machine = Machine(memory, 1e8, unfreeable=lambda micro: 1e8 + 1.5e7 * micro, rounding=CAPACITY)
    found, _, short = machine.find()
    assert close(found, true(memory)) and short <= 1, machine.begun


def test_what_frees_the_cache_in_every_step_costs_nothing_of_what_the_peaks_allow() -> None:
    memory: Memory = lambda micro: (1e8 + 3e7 * micro, 0.0)  # noqa: E731
    machine = Machine(memory, 1e8, thrashes_above=120, unfreeable=lambda micro: 1e8 + 2e7 * micro)
    found, _, short = machine.find()
    assert true(memory) - 1 <= found <= 120 and short == 0, machine.begun


@pytest.mark.parametrize("failed", [None, 50, 40])
def test_an_evaluation_does_not_take_a_size_that_ran_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, failed: int | None
) -> None:
    """An earlier child evaluated with the training's largest, which is 50, or with less, and ran out of memory."""
    machine = Machine(lambda micro: (2e8 + 2e7 * micro, 0.0), 2e8)
    monkeypatch.setattr(probe, "evaluation_step", machine.step)
    facts = SimpleNamespace(validation_rows=60)
    model = SimpleNamespace(eval=lambda: None, train=lambda: None)
    bundle: Any = SimpleNamespace(device=machine, model=model, data=SimpleNamespace(facts=facts))
    probes = (Probe(micro_batch_size=failed, peak_bytes=None, phase=ProbePhase.evaluation),) if failed else ()
    found = probe.evaluation(bundle, machine.send, 50, EarlierProbes(probes))
    assert found < failed if failed else found == 50


@pytest.mark.parametrize(("longest", "first"), [(512, 2), (64, 16), (4096, 1), (8, 50)])
def test_what_is_not_confirmed_is_checked_at_a_small_size(longest: int, first: int) -> None:
    line = MemoryLine(rest_bytes=1e9, slope_bytes=(CAPACITY * 0.99 - 1e9) / 100.5)
    machine = Machine(lambda micro: (line.at(micro), 0.0), 1e9)
    bundle: Any = SimpleNamespace(
        device=machine,
        recipe=SimpleNamespace(rows_are_packed=False),
        data=SimpleNamespace(facts=SimpleNamespace(longest=longest)),
    )
    search = Search(bundle, ProbePhase.training, machine.step, (10**6, "bound"), machine.send, EarlierProbes((), line))
    found = search.search(confirm=False)
    assert machine.begun == [first] and found.largest == first and found.predicted > first
