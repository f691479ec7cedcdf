"""Children that are kept for another request: whom, for how long, and what happens when one of them fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from service.contract.child import EndingKind, Result, RunBlock, RunReplay, RunSoak, Workplace
from service.contract.job import JobSpec
from service.contract.measurement import Measurement
from service.contract.task import keeps_process
from tests.child import tiny
from tests.conftest import ROOT
from tests.factory import configuration, measured
from worker.runner.kept import Keeper
from worker.runner.main import environment
from worker.runner.sandbox import Sandbox

PADDED, SORTED = (measured(configuration(batching=one), 10.0) for one in ("padded", "sorted"))


class Bench:
    """A keeper of stub children, which write down their process, and what they are asked."""

    def __init__(self, folder: Path, spec: JobSpec, entry: str) -> None:
        self.sandbox, self.folder, self.spec = Sandbox(False, f"tests.stubs:{entry}"), folder, spec
        self.keeper = Keeper(self.sandbox, lambda: False, None, None)

    def block(self, number: int, candidate: Measurement = PADDED, **more: Any) -> RunBlock:
        return RunBlock(**self._given(candidate), block=number, seed=number, **({"stays": True} | more))

    def replay(self, seed: int, candidate: Measurement = PADDED, **more: Any) -> RunReplay:
        values = {"count": 2, "samples_a_step": 4, "stays": True} | more
        return RunReplay(**self._given(candidate), seed=seed, **values)

    def soak(self) -> RunSoak:
        return RunSoak(**self._given(PADDED), seed=0, seconds=1.0)

    def _given(self, candidate: Measurement) -> dict[str, Any]:
        place = Workplace(device="cpu", data_roots=(self.folder,), hub_cache=self.folder)
        return {"workplace": place, "spec": self.spec, "candidate": candidate}

    def served(self) -> list[tuple[int, str]]:
        """(process, seed) of every request, in their order."""
        lines = (self.folder / "served").read_text().splitlines()
        return [(int(one.split()[0]), one.split()[1]) for one in lines]

    def processes(self) -> list[int]:
        """The process of every request, in their order, numbered from 0 on."""
        pids = [pid for pid, _ in self.served()]
        return [list(dict.fromkeys(pids)).index(pid) for pid in pids]


@pytest.fixture
def bench(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spec: Callable[..., JobSpec]
) -> Iterator[Callable[..., Bench]]:
    """Makes a bench of children with that entry of tests/stubs.py."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("DYNOTUNE_LOCKS", str(tmp_path))
    made: list[Bench] = []

    def make(entry: str = "staying") -> Bench:
        made.append(Bench(tmp_path, spec(), entry))
        return made[-1]

    yield make
    for one in made:
        one.keeper.close()
        one.sandbox.close()


def test_the_next_block_of_a_candidate_has_its_process(bench: Callable[..., Bench]) -> None:
    made = bench()
    first, second = made.keeper.alone(made.block(0), 60), made.keeper.alone(made.block(1, stays=False), 60)
    assert made.processes() == [0, 0] and [one.kind for one in (first, second)] == [EndingKind.result] * 2
    assert "seed 0" in first.log and "seed 1" in second.log and "seed 0" not in second.log
    assert not made.keeper.keeps_for(made.block(2))
    made.keeper.alone(made.block(2), 60)
    assert made.processes() == [0, 0, 1]


def test_it_ends_before_anything_else_begins(bench: Callable[..., Bench]) -> None:
    made = bench()
    for request in (made.block(0), made.block(0, SORTED), made.block(1, SORTED), made.soak(), made.block(1)):
        alive = [pid for pid, _ in made.served()] if (made.folder / "served").exists() else []
        made.keeper.alone(request, 60)
        now = made.served()[-1][0]
        assert not any(psutil.pid_exists(pid) for pid in alive if pid != now)
    assert made.processes() == [0, 1, 1, 2, 3]
    made.keeper.close()
    assert not any(psutil.pid_exists(pid) for pid, _ in made.served())


def test_replays_of_the_reference_differ_in_rate_and_seed_only(bench: Callable[..., Bench]) -> None:
    made = bench()
    faster = PADDED.model_copy(
        update={"configuration": PADDED.configuration.model_copy(update={"learning_rate": 1e-3})}
    )
    requests = [made.replay(1), made.replay(1, faster, steps=((1, 2),)), made.replay(2), made.replay(1, SORTED)]
    for request in requests:
        assert isinstance(made.keeper.alone(request, 60).last, Result)
    assert made.processes() == [0, 0, 0, 1]


def test_what_fails_in_a_kept_process_is_judged_in_a_fresh_one(bench: Callable[..., Bench]) -> None:
    """The stub dies of the second request that a process gets."""
    made = bench("staying_once")
    assert made.keeper.alone(made.block(0), 60).kind is EndingKind.result
    again = made.keeper.alone(made.block(1, stays=False), 60)
    assert again.kind is EndingKind.result and made.processes() == [0, 0, 1]
    assert [seed for _, seed in made.served()] == ["0", "1", "1"]


def test_one_that_died_while_it_waited_is_replaced(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.keeper.alone(made.block(0), 60)
    process = psutil.Process(made.served()[0][0])
    process.kill()
    psutil.wait_procs([process], timeout=10)
    assert made.keeper.alone(made.block(1), 60).kind is EndingKind.result
    assert made.processes() == [0, 1]


def test_candidates_that_take_turns_are_kept_together(bench: Callable[..., Bench]) -> None:
    made = bench()

    def both(number: int) -> list[EndingKind]:
        asked = [made.block(number, one, in_turns=True) for one in (PADDED, SORTED)]
        return [ending.kind for ending in made.keeper.together(asked, [60.0, 60.0])]

    assert both(0) == both(1) == [EndingKind.result] * 2
    assert made.processes() == [0, 1, 0, 1]
    made.keeper.together([made.block(2, SORTED, in_turns=True)], [60.0])
    assert made.processes() == [0, 1, 0, 1, 1] and not psutil.pid_exists(made.served()[0][0])


def test_turns_in_which_a_kept_one_fails_are_taken_again(bench: Callable[..., Bench]) -> None:
    made = bench("staying_once")
    for number in range(2):
        asked = [made.block(number, one, in_turns=True) for one in (PADDED, SORTED)]
        assert [ending.kind for ending in made.keeper.together(asked, [60.0, 60.0])] == [EndingKind.result] * 2
    assert made.processes()[:2] == [0, 1] and made.processes()[-2:] == [2, 3]


def test_a_real_child_replays_again_what_a_fresh_one_replays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    model, data = tiny.save("llama", tmp_path / "llama"), tiny.write(tmp_path / "rows.jsonl", tiny.pairs(24))
    candidate = measured(configuration(effective=8, precision="fp32"), micro_batch_size=2)
    given: dict[str, Any] = {"workplace": tiny.workplace(tmp_path), "spec": tiny.job(model, data)}
    asked = RunReplay(candidate=candidate, seed=1, count=2, samples_a_step=4, stays=True, **given)
    other = asked.model_copy(update={"seed": 2, "stays": False})
    sandbox = Sandbox(False)
    keeper = Keeper(sandbox, lambda: False, None, None)
    try:
        assert isinstance(keeper.alone(asked, 120).last, Result) and keeper.keeps_for(other)
        kept, fresh = keeper.alone(other, 120), keeper.alone(other, 120)
    finally:
        keeper.close()
        sandbox.close()
    assert isinstance(kept.last, Result) and isinstance(fresh.last, Result)
    assert kept.last.replay and kept.last == fresh.last and not keeper.keeps_for(other)


def test_only_an_adapter_whose_model_takes_longer_to_load_than_a_block_is_kept() -> None:
    large = measured(configuration(), 10.0, load_seconds=60.0)
    assert keeps_process(large)
    assert not keeps_process(large.model_copy(update={"load_seconds": 5.0}))
    assert not keeps_process(measured(configuration("full"), 10.0, load_seconds=60.0))
    assert not keeps_process(large.model_copy(update={"timing": None}))
