"""A verification for the least memory: finalists slower than the baseline, and soaks that show another peak."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.contract.child import EndingKind, Result, RunBlock, RunReplay, RunSoak, Workplace
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Soak
from service.contract.task import VerifyRequest
from tests.factory import block, configuration, measured, replay
from worker.runner.measuring import Bench
from worker.runner.sandbox import Ending
from worker.runner.verifying import Verifier

GIB = 1 << 30
NAMES = {"base": "padded", "slim": "sorted", "large": "grouped", "spare": "packed"}
PEAKS = {"base": 8, "slim": 2, "large": 4, "spare": 6}
MICRO = {"base": 8}
MADE = {
    name: measured(configuration(micro=MICRO.get(name), batching=batching), 10.0, peak_bytes=PEAKS[name] * GIB)
    for name, batching in NAMES.items()
}


class Children:
    """Answers as children would: blocks of so many seconds, soaks with such a peak. It remembers what was asked."""

    def __init__(self, seconds: dict[str, float], soaked: dict[str, int]) -> None:
        self._seconds, self._soaked = seconds, soaked
        self.asked: list[str] = []

    @contextlib.contextmanager
    def started(self, request: Any, _: object) -> Iterator[Any]:
        """A child that is asked for this request."""
        yield SimpleNamespace(watch=lambda *_: self._answer(request))

    def _answer(self, request: Any) -> Ending:
        name = next(one for one, batching in NAMES.items() if batching == _batching(request))
        if isinstance(request, RunBlock):
            self.asked.append(f"block of {name}")
            done = Result(block=block(MADE[name], self._seconds[name], request.block))
        elif isinstance(request, RunSoak):
            self.asked.append(f"soak of {name}")
            peak = self._soaked.get(name, PEAKS[name]) * GIB
            done = Result(soak=Soak(micro_batch_size=8, steps=4, wanted_steps=4, peak_bytes=peak))
        else:
            assert isinstance(request, RunReplay)
            done = Result(replay=replay(request.samples_a_step))
        return Ending(EndingKind.result, last=done)


def _batching(request: RunBlock | RunSoak | RunReplay) -> str:
    return request.candidate.configuration.levers["batching"]


@pytest.fixture
def verified(spec: Callable[..., JobSpec], facts: Callable[..., HardwareFacts], tmp_path: Path) -> Callable[..., Any]:
    """(the names in the order of the verification, what was asked of children)."""

    def run(seconds: dict[str, float], soaked: dict[str, int] | None = None, objective: str = "memory") -> Any:
        children: Any = Children(seconds, soaked or {})
        place = Workplace(device="cpu", data_roots=(tmp_path,), hub_cache=tmp_path)
        bench = Bench(children, facts(memory_bytes=GIB), tmp_path, place)  # too little for two at a time
        request = VerifyRequest(
            method="lora",
            baseline=MADE["base"],
            finalists=(MADE["slim"], MADE["large"]),
            reserves=(MADE["spare"],),
            blocks=2,
            seconds_limit=600.0,
        )
        job = spec(search={"objective": objective, "verify": "quick"})
        found = Verifier(bench, job, "j", request, lambda _: None, lambda: False, None).run()
        assert found is not None
        names = {one.configuration.key: name for name, one in MADE.items()}
        return [names[key] for key in found.ranking], children.asked

    return run


def test_the_least_memory_that_is_not_slower_is_soaked(verified: Callable[..., Any]) -> None:
    ranking, asked = verified({"base": 10.0, "slim": 12.0, "large": 9.0, "spare": 1.0})
    assert ranking == ["large", "base"]
    assert [one for one in asked if "soak" in one] == ["soak of large"]
    assert "block of spare" not in asked


def test_where_all_finalists_are_slower_a_reserve_follows(verified: Callable[..., Any]) -> None:
    seconds = {"base": 10.0, "slim": 12.0, "large": 12.0, "spare": 9.0}
    ranking, asked = verified(seconds)
    assert ranking == ["spare", "base"] and asked[-1] == "soak of spare"
    usual, asked = verified(seconds, objective="wall-clock")
    assert usual[0] == "base" and "block of spare" not in asked, "of time, the baseline is the answer then"


def test_a_soak_that_takes_more_hands_on_to_the_next(verified: Callable[..., Any]) -> None:
    ranking, asked = verified({"base": 10.0, "slim": 9.0, "large": 9.0, "spare": 9.0}, {"slim": 5})
    assert ranking == ["large", "slim", "base"]
    assert [one for one in asked if "soak" in one] == ["soak of slim", "soak of large"]
