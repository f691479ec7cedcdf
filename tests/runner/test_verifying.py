"""A verification by stub children that are as fast as their trials were: who runs in which block, and who is first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.comparisons import waterfall
from service.contract.child import ChildFailed, EndingKind, RunBlock, RunSoak, Workplace
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Outcome, Soak, Timing, Verification
from service.contract.task import VerifyRequest
from tests.conftest import ROOT
from tests.factory import configuration, measured
from worker.runner.measuring import Bench
from worker.runner.sandbox import Ending, Sandbox
from worker.runner.verifying import Verifier, _Ended, lowered

BASELINE = measured(configuration(micro=8), 20.0)
LEVERS: dict[str, Any] = {"batching": "sorted", "attention": "eager"}
FASTEST = measured(configuration(**LEVERS), 5.0)
WITHOUT_BATCHING = measured(configuration(attention="eager"), 9.0)

Verify = Callable[..., tuple[Verification, list[list[str]]]]


@pytest.fixture
def verify(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spec: Callable[..., JobSpec], facts: Callable[..., Any]
) -> Iterator[Verify]:
    """Verifies FASTEST beside what it is without a lever; the verification, and the keys in each block."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("DYNOTUNE_LOCKS", str(tmp_path))
    sandbox = Sandbox(False, "tests.stubs:as_timed")
    place = Workplace(device="cpu", data_roots=(tmp_path,), hub_cache=tmp_path)

    def run(
        *taken_back: Measurement,
        seconds: float = 3600.0,
        memory: int = 64 << 30,
        finalists: tuple[Measurement, ...] = (FASTEST,),
        told: Callable[[str], None] = lambda _: None,
    ) -> tuple[Verification, list[list[str]]]:
        bench = Bench(sandbox, facts(memory_bytes=memory), tmp_path, place)
        request = VerifyRequest(
            method="lora",
            baseline=BASELINE,
            finalists=finalists,
            taken_back=taken_back,
            blocks=2,
            seconds_limit=seconds,
        )
        job = spec(search={"verify": "standard"})
        found = Verifier(bench, job, "job", request, told, lambda: False, None).run()
        assert found is not None
        lines = [line.split() for line in (Path(os.environ["DYNOTUNE_LOCKS"]) / "blocks").read_text().splitlines()]
        blocks: dict[str, list[str]] = {}
        for number, _, key in lines:
            blocks.setdefault(number, []).append(key)
        return found, list(blocks.values())

    yield run
    sandbox.close()


def test_the_fastest_takes_turns_with_itself_without_each_lever(verify: Verify, spec: Callable[..., JobSpec]) -> None:
    without_attention = measured(configuration(batching="sorted"), 6.0)
    found, blocks = verify(WITHOUT_BATCHING, without_attention)
    keys = {one.configuration.key for one in (FASTEST, WITHOUT_BATCHING, without_attention)}
    assert [set(block) for block in blocks[2:]] == [keys, keys], "after two blocks with the baseline"
    assert found.ranking[0] == FASTEST.configuration.key
    told = waterfall(spec(), FASTEST, BASELINE, (), found.verdicts)
    factors = {one.lever: one.factor for one in told.contributions}
    assert factors["batching"] == pytest.approx(1.8, abs=0.02) and factors["attention"] == pytest.approx(1.2, abs=0.02)


def test_a_lever_that_brings_nothing_is_left_out_of_the_answer(verify: Verify) -> None:
    simpler = measured(configuration(batching="sorted"), 5.05)
    said: list[str] = []
    found, _ = verify(simpler, told=said.append)
    assert found.ranking[0] == simpler.configuration.key
    assert any(one.startswith("soak at micro batch 8: ") for one in said)
    verdict = next(one for one in found.verdicts if one.key == simpler.configuration.key)
    assert verdict.stable and verdict.proof is not None and verdict.soak is not None, "it is held itself"
    # It ran in no block with the baseline, but with the fastest, which did.
    assert verdict.speedup is not None and verdict.speedup_low is not None
    assert verdict.speedup == pytest.approx(20.0 / 5.05, rel=0.05) and verdict.speedup_low < verdict.speedup


def test_what_was_not_held_itself_is_never_the_answer(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is stopped while a simpler one, which was as fast, would be proved."""

    def stopped(*_: object) -> Any:
        raise _Ended

    original = Verifier._take_levers_back

    def without_proof(self: Verifier) -> None:
        monkeypatch.setattr(self._prover, "proof", stopped)
        original(self)

    monkeypatch.setattr(Verifier, "_take_levers_back", without_proof)
    simpler = measured(configuration(batching="sorted"), 5.05)
    found, blocks = verify(simpler)
    assert len(blocks) == 4 and simpler.configuration.key in blocks[-1]
    assert found.ranking[0] == FASTEST.configuration.key, "what was held before is the answer"
    assert simpler.configuration.key not in found.ranking


def test_blocks_that_ran_before_a_stop_put_nothing_first_that_is_not_held(
    verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While levers are taken back the other finalist turns out to be faster, and the job is stopped before its soak."""
    other = measured(configuration(attention="eager"), 9.0)

    def turned(self: Verifier) -> None:
        factor = {FASTEST.configuration.key: 3.0}
        self._blocks = [
            one.model_copy(update={"timing": scaled(one.timing, factor.get(one.key, 1.0))}) for one in self._blocks
        ]

    def scaled(timing: Timing | None, factor: float) -> Timing | None:
        return timing and timing.model_copy(
            update={name: factor * getattr(timing, name) for name in ("seconds", "low", "high")}
        )

    monkeypatch.setattr(Verifier, "_take_levers_back", turned)
    found, _ = verify(finalists=(FASTEST, other))
    assert found.ranking[0] == FASTEST.configuration.key and found.verdicts[-1].soak is None


def test_a_lowered_micro_batch_is_that_of_the_turns(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    original, soaked = Verifier._soak, list[int | None]()

    def short_of_memory_at_first(self: Verifier, candidate: Measurement) -> Soak | str:
        soaked.append(candidate.micro_batch_size)
        found = original(self, candidate)
        self._unsafe = len(soaked) == 1
        return "the soak failed (infeasible): memory ran out" if self._unsafe else found

    monkeypatch.setattr(Verifier, "_soak", short_of_memory_at_first)
    asked: list[tuple[str, int | None]] = []
    run = Verifier._asked

    def noted(self: Verifier, candidate: Measurement, number: int) -> RunBlock:
        asked.append((candidate.configuration.key, candidate.micro_batch_size))
        return run(self, candidate, number)

    monkeypatch.setattr(Verifier, "_asked", noted)
    found, _ = verify(WITHOUT_BATCHING)
    assert soaked == [8, 4] and found.ranking[0] == FASTEST.configuration.key
    assert [size for key, size in asked if key == FASTEST.configuration.key] == [8, 8, 4, 4, 4, 4]


def unsafe_at_first(monkeypatch: pytest.MonkeyPatch, after: Callable[[Verifier], None] = lambda _: None) -> None:
    """The first soak runs out of memory, and `after` is called then."""
    original, count = Verifier._soak, iter(range(100))

    def soak(self: Verifier, candidate: Measurement) -> Soak | str:
        found = original(self, candidate)
        self._unsafe = next(count) == 0
        if self._unsafe:
            after(self)
        return "the soak failed (infeasible): memory ran out" if self._unsafe else found

    monkeypatch.setattr(Verifier, "_soak", soak)


def test_a_lowered_baseline_stays_comparable(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a slower configuration would be the answer, for want of a block beside it."""
    unsafe_at_first(monkeypatch)
    slower = [measured(configuration(attention="eager"), 36.0), measured(configuration(batching="sorted"), 38.0)]
    found, _ = verify(finalists=tuple(slower))
    assert found.ranking[0] == found.baseline_key == BASELINE.configuration.key
    speedups = {one.key: one.speedup for one in found.verdicts}
    assert speedups[slower[0].configuration.key] == pytest.approx(20 / 36, rel=0.02)


def test_what_was_lowered_runs_though_no_time_is_left(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what has just been proved and soaked would not be the answer; here candidates run one after another."""
    unsafe_at_first(monkeypatch, lambda _: monkeypatch.setattr(Verifier, "_left", lambda _: 0.0))
    found, _ = verify(finalists=(FASTEST, WITHOUT_BATCHING), memory=1 << 30)
    assert found.ranking[0] == FASTEST.configuration.key
    verdict = next(one for one in found.verdicts if one.key == found.ranking[0])
    assert verdict.speedup == pytest.approx(4.0, rel=0.02), "beside the baseline"


def test_with_the_micro_batch_the_evaluation_s_batch_is_lowered() -> None:
    """The evaluation may be what ran out of memory."""
    lower = lowered(FASTEST.model_copy(update={"micro_batch_size": 8, "evaluation_batch_size": 64}))
    assert lower is not None and (lower.micro_batch_size, lower.evaluation_batch_size) == (4, 32)


@pytest.mark.parametrize("kind", [EndingKind.failed, EndingKind.signal, EndingKind.ended])
def test_a_soak_goes_on_after_an_interruption_but_not_after_a_failure(
    verify: Verify, monkeypatch: pytest.MonkeyPatch, kind: EndingKind
) -> None:
    """Or the next worker's soak would begin behind the step that failed, and pass."""
    original, files = Verifier._run, set[Path]()

    def dying(self: Verifier, request: Any) -> Ending:
        if not isinstance(request, RunSoak):
            return original(self, request)
        assert request.state is not None
        request.state.parent.mkdir(parents=True, exist_ok=True)
        request.state.write_text("{}")
        files.add(request.state)
        said = ChildFailed(outcome=Outcome.unstable, reason="step 150 went wrong")
        ending = Ending(kind, "", said if kind is EndingKind.failed else None)
        self._check(ending)
        return ending

    monkeypatch.setattr(Verifier, "_run", dying)
    if kind is EndingKind.ended:
        with pytest.raises(AssertionError, match="is not None"):
            verify()
    else:
        found, _ = verify()
        assert not found.ranking and all("the soak failed" in one.reasons[0] for one in found.verdicts)
    assert files and all(one.exists() is (kind is EndingKind.ended) for one in files)


def test_where_memory_holds_few_they_come_in_groups(verify: Verify) -> None:
    peak = FASTEST.peak_bytes or 0
    without_attention = measured(configuration(batching="sorted"), 6.0)
    _, blocks = verify(WITHOUT_BATCHING, without_attention, memory=int(2.5 * peak))
    assert [len(block) for block in blocks] == [2, 2, 2, 2, 2, 2]


def test_without_time_for_it_trials_have_to_tell(verify: Verify) -> None:
    found, blocks = verify(WITHOUT_BATCHING, seconds=60.0)
    assert len(blocks) == 2 and found.ranking[0] == FASTEST.configuration.key


def test_time_is_looked_at_before_each_candidate(verify: Verify) -> None:
    """The second finalist's block alone would take longer than all of them may; the first one's never is left out."""
    slow = measured(configuration(attention="eager"), 400.0)
    found, blocks = verify(seconds=200.0, memory=1 << 30, finalists=(FASTEST, slow))
    assert {key for block in blocks for key in block} == {one.configuration.key for one in (BASELINE, FASTEST)}
    assert found.ranking[0] == FASTEST.configuration.key
    told = next(one for one in found.verdicts if one.key == slow.configuration.key)
    assert not told.stable and told.reasons == ("it was not run",)
    found, _ = verify(seconds=1.0, memory=1 << 30, finalists=(slow,))
    assert slow.configuration.key in {block.key for block in found.blocks}
