"""A verification held to a device whose truth is known: ratios, intervals, ties, and what a soak has to find."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from service.contract.configuration import Configuration
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Timing
from service.contract.task import VerifyRequest
from tests.child import tiny
from tests.factory import configuration, measured
from tests.runner.simulation import Simulation
from worker.child import block as child_block
from worker.child.arrange import plan_of
from worker.child.build import Bundle
from worker.child.data import work_unit
from worker.child.timing import Unit
from worker.devices.simulated import Simulated, Span, World
from worker.plan.ratios import ratio
from worker.runner.measuring import Bench
from worker.runner.verifying import Verifier

QUIET = World(flops=2e8, bandwidth=2e8, first_call_seconds=0.3, segment_seconds=1e-3)
UNIT, EFFECTIVE, MICRO = 16, 2, 2  # samples
PLAIN = {"precision": "fp32", "adapter": "attention-only"}
SLOW, FAST = (PLAIN | {"checkpointing": one} for one in ("full", "off"))
MIB = 1 << 20
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")


def unit_of(spec: JobSpec, data: Any, seed: int) -> list[int]:
    """A unit that is small enough for a test."""
    return work_unit(data.lengths, UNIT, seed, EFFECTIVE)


class Case:
    """A job on a tiny model, candidates with known times, and verifications of them on simulated GPUs."""

    def __init__(
        self, model: Path, data: Path, folder: Path, facts: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.folder, self._facts, self._monkeypatch = folder, facts, monkeypatch
        training = {"effective_batch_size": EFFECTIVE, "learning_rate": 1e-3}
        search = {"verify": "quick", "objective": "throughput", "soak_steps": 60}
        self.spec = tiny.job(model, data, training=training, search=search)
        self.place = tiny.workplace(model, data.parent).model_copy(update={"device": "simulated"})

    def seconds(self, made: Configuration, seed: int) -> float:
        """What the unit truly takes under a block's seed, where nothing is called for the first time."""
        device = Simulated(world=replace(QUIET, first_call_seconds=0.0, segment_seconds=0.0))
        try:
            bundle = tiny.built(self.spec, made, device, seed)
            unit = Unit(bundle, MICRO, plan_of(bundle, unit_of(self.spec, bundle.data, seed), MICRO))
            unit.run()
            device.synchronize()
            began = device.host
            unit.run()
            return device.host - began
        finally:
            device.close()

    def candidate(self, seconds: float, **levers: str) -> Measurement:
        """A measurement as its trial would have made it."""
        timing = Timing(
            micro_batch_size=MICRO,
            seconds=seconds,
            low=seconds,
            high=seconds,
            samples=UNIT,
            tokens=UNIT * 40,
            padded_tokens=UNIT * 60,
            steps=UNIT // EFFECTIVE,
            passes=2,
            clean_share=1.0,
            largest_share_of_others=0.0,
        )
        made = configuration("lora", EFFECTIVE, MICRO, **levers)
        return measured(
            made, micro_batch_size=MICRO, gradient_accumulation_steps=1, timing=timing, evaluation_batch_size=MICRO
        )

    def verifier(
        self, world: World, *candidates: Measurement, blocks: int = 4, memory_gib: int = 64, seconds: float = 3600.0
    ) -> tuple[Verifier, Simulation]:
        """A verification of the candidates, of which the first is the baseline, and what it runs on."""
        simulation = Simulation(world, self.folder, self._monkeypatch)
        facts = self._facts(memory_bytes=memory_gib << 30, has_own_memory=True)
        bench = Bench(simulation, facts, self.folder, self.place)  # type: ignore[arg-type]
        request = VerifyRequest(
            method="lora", baseline=candidates[0], finalists=candidates[1:], blocks=blocks, seconds_limit=seconds
        )
        return Verifier(bench, self.spec, "job", request, lambda _: None, lambda: False, None), simulation


@pytest.fixture
def case(
    llama: Path, functions: Path, tmp_path: Path, facts: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Case:
    monkeypatch.setattr(child_block, "unit_of", unit_of)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.set_num_threads(1)
    return Case(tiny.changed(llama, tmp_path / "llama", num_hidden_layers=1), functions, tmp_path, facts, monkeypatch)


TRUE_SECONDS: list[float] = []  # of the slow and the fast candidate's unit: the same in every test


@pytest.fixture
def pair(case: Case) -> tuple[Measurement, Measurement, float]:
    """(a slow candidate, a fast one, how many times as fast it truly is)."""
    if not TRUE_SECONDS:
        both = [configuration("lora", EFFECTIVE, MICRO, **levers) for levers in (SLOW, FAST)]
        TRUE_SECONDS.extend(case.seconds(one, 1) for one in both)
    took = TRUE_SECONDS
    slow, fast = case.candidate(took[0], **SLOW), case.candidate(took[1], **FAST)
    return slow, fast, took[0] / took[1]


def spans(share: float, least: float, most: float, seed: int = 0, until: float = 3000.0) -> tuple[Span, ...]:
    """Bursts of random lengths, with gaps of the same lengths between them."""
    rng, at, found = random.Random(seed), 0.0, []
    while at < until:
        begins = at + rng.uniform(least, most)
        at = begins + rng.uniform(least, most)
        found.append(Span(begins, at, share))
    return tuple(found)


WORLDS = {
    "quiet": QUIET,
    "bursts": replace(QUIET, others=spans(0.5, 20.0, 60.0)),
    "throttled": replace(QUIET, throttled=spans(0.4, 20.0, 60.0, seed=1)),
    "drifting": replace(QUIET, drift=0.002),
}


@pytest.mark.parametrize("world", WORLDS)
def test_in_turns_the_ratio_is_what_is_true(case: Case, pair: Any, world: str) -> None:
    slow, fast, true = pair
    verifier, _ = case.verifier(WORLDS[world], slow, fast)
    verifier.run_blocks()
    blocks = verifier.judged().blocks
    assert all(one.slices for one in blocks), blocks
    found = ratio(case.spec, blocks, fast, slow)
    assert found is not None
    assert found[0] == pytest.approx(true, rel=0.02) and found[1] <= true <= found[2]


def test_processes_that_train_two_blocks_find_the_same(case: Case, pair: Any) -> None:
    """Their models take longer to load than a block takes, so the second block spares that."""
    slow, fast, true = pair
    large = [one.model_copy(update={"load_seconds": 600.0}) for one in (slow, fast)]
    verifier, simulation = case.verifier(QUIET, *large, blocks=2)
    verifier.run_blocks()
    blocks = verifier.judged().blocks
    assert simulation.started_count == 2 and [one.process for one in blocks] == [None, None, 0, 0]
    found = ratio(case.spec, blocks, large[1], large[0])
    assert found is not None
    assert found[0] == pytest.approx(true, rel=0.02) and found[1] <= true <= found[2]


def test_one_after_another_a_drift_of_the_pace_cancels(case: Case, pair: Any) -> None:
    """They do not fit together, so a block is followed by one in reverse order, even if only one is asked for."""
    slow, fast, true = pair
    verifier, _ = case.verifier(replace(QUIET, drift=0.002), slow, fast, blocks=1, memory_gib=4)
    verifier.run_blocks()
    blocks = verifier.judged().blocks
    assert not any(one.slices for one in blocks)
    assert [one.block for one in blocks] == [0, 0, 1, 1]
    assert [one.key == slow.configuration.key for one in blocks] == [True, False, False, True]
    for first, wrong in ((0, 0.985), (2, 1.015)):
        alone = ratio(case.spec, blocks[first : first + 2], fast, slow)
        assert alone is not None and (alone[0] / true - wrong) * (wrong - 1) > 0, "a block alone is wrong"
    found = ratio(case.spec, blocks, fast, slow)
    assert found is not None and found[0] == pytest.approx(true, rel=0.01) and found[1] <= true <= found[2]


def test_without_time_a_block_stays_alone(case: Case, pair: Any) -> None:
    verifier, _ = case.verifier(QUIET, *pair[:2], memory_gib=4, seconds=1e-3)
    verifier.run_blocks()
    assert [one.block for one in verifier.judged().blocks] == [0, 0]


def test_the_drift_cancels_for_a_baseline_that_rests_too(case: Case, pair: Any) -> None:
    """A quick verification leaves the baseline out of some blocks, but of both of a pair or of none."""
    slow, fast, true = pair
    other = case.candidate(slow.timing.seconds, **SLOW, projections="without-cast")
    verifier, _ = case.verifier(replace(QUIET, drift=0.002), slow, fast, other, blocks=2, memory_gib=4)
    verifier.run_blocks()
    blocks = verifier.judged().blocks
    assert [one.block for one in blocks if one.key == slow.configuration.key] == [0, 1]
    found = ratio(case.spec, blocks, fast, slow)
    assert found is not None and found[0] == pytest.approx(true, rel=0.01) and found[1] <= true <= found[2]


def test_equal_candidates_are_called_tied(case: Case, pair: Any) -> None:
    """Two of three are the same but for a lever that does nothing in fp32; the baseline is slower."""
    slow, fast, _ = pair
    same = case.candidate(fast.timing.seconds, **FAST, projections="without-cast")
    world = replace(QUIET, others=spans(0.5, 20.0, 60.0, seed=2))
    verifier, _ = case.verifier(world, slow, same, fast)
    verifier.run_blocks()
    judged = verifier.judged()
    assert judged.tied and "tied" in judged.note
    assert judged.ranking[0] == fast.configuration.key, "of equal ones the simpler comes first"
    assert judged.ranking[-1] == slow.configuration.key
    between = ratio(case.spec, judged.blocks, same, fast)
    assert between is not None and between[0] == pytest.approx(1.0, abs=0.02) and between[1] < 1.0 < between[2]


def leaking(bundle: Bundle) -> None:
    """The model keeps a MiB each time it is called."""
    kept: list[torch.Tensor] = []
    bundle.model.register_forward_hook(lambda *_: kept.append(torch.zeros(MIB, dtype=torch.uint8)))


def slowing(bundle: Bundle) -> None:
    """Each call takes the device a twentieth of a step longer than the one before."""
    calls, device = iter(range(100_000)), bundle.device
    assert isinstance(device, Simulated)
    bundle.model.register_forward_pre_hook(lambda *_: device.launch(0.1 * next(calls), is_first=False))


def fragmenting(bundle: Bundle) -> None:
    """Each call needs a buffer for which no cached segment is large enough, and memory has little room."""
    bundle.device.limit(bundle.device.used() + 200 * MIB)
    sizes = iter(range(20, 100_000, 2))

    def buffer(*_: Any) -> None:
        torch.ones(next(sizes) * MIB, dtype=torch.uint8)

    bundle.model.register_forward_pre_hook(buffer)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "reason"),
    [(leaking, "memory held between steps keeps growing"), (slowing, "times slower over"), (fragmenting, "two steps")],
)
def test_what_a_soak_finds_is_the_verdict(case: Case, pair: Any, fault: Any, reason: str) -> None:
    """The fastest has a fault that only many steps show, so the next one is recommended."""
    slow, fast, _ = pair
    verifier, simulation = case.verifier(QUIET, slow, fast, blocks=2)
    simulation.faults[fast.configuration.key] = fault
    judged = verifier.run()
    assert judged is not None
    verdicts = {one.key: one for one in judged.verdicts}
    bad, good = verdicts[fast.configuration.key], verdicts[slow.configuration.key]
    assert not bad.stable and any(reason in one for one in bad.reasons), bad.reasons
    assert bad.speedup and bad.speedup > 1 and bad.proof is not None and not bad.proof.reasons
    assert good.stable and good.soak and judged.ranking == (slow.configuration.key,)
