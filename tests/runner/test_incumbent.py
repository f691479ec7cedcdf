"""The best trial's process of a search: which trials take turns with it, what that tells, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from service.contract.child import Workplace
from service.contract.job import JobSpec
from service.contract.measurement import Measurement
from service.contract.states import Origin
from service.contract.task import Claim, TaskKind, TrialClaim, TrialRequest
from tests.child import tiny
from tests.conftest import ROOT
from tests.factory import block, configuration, measured, timing
from tests.runner.test_loop import FakeQueue
from worker.runner import incumbent as incumbent_room
from worker.runner.incumbent import Incumbent, in_turns
from worker.runner.lock import DeviceLock
from worker.runner.loop import Loop
from worker.runner.main import environment
from worker.runner.measuring import Bench, measure
from worker.runner.sandbox import Sandbox


class Search:
    """Trials one after another on one device, with the stub tests/stubs.py::contending in their place."""

    def __init__(self, folder: Path, spec: JobSpec, facts: Any) -> None:
        self.folder, self.spec = folder, spec
        place = Workplace(device=facts.device, data_roots=(folder,), hub_cache=folder)
        self.bench = Bench(Sandbox(False, "tests.stubs:contending"), facts, folder, place)
        self.incumbent = Incumbent(self.bench)
        self.pace(1.0)

    def pace(self, factor: float) -> None:
        """From now on a trial alone takes so many times as long."""
        (self.folder / "pace").write_text(str(factor))

    def trial(self, batching: str, **told: Any) -> Measurement:
        """What a trial with that batching measured."""
        request = TrialRequest(configuration=configuration(batching=batching), origin=Origin.search, number=1, **told)
        found, _ = measure(
            self.bench,
            self.spec,
            "j",
            request,
            lambda _: None,
            lambda: False,
            None,
            incumbent=self.incumbent,
        )
        assert found is not None
        return found

    def alive(self) -> list[str]:
        """The batchings of the trials whose processes are alive."""
        rows = [line.split() for line in (self.folder / "trials").read_text().splitlines()]
        return [batching for pid, batching in rows if psutil.pid_exists(int(pid))]


def seconds(found: Measurement) -> float:
    """Of the unit."""
    assert found.timing is not None
    return found.timing.seconds


@pytest.fixture
def search(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spec: Callable[..., JobSpec], facts: Callable[..., Any]
) -> Iterator[Callable[..., Search]]:
    """Makes a search of a job with these parts of its description on a device with these facts."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("DYNOTUNE_LOCKS", str(tmp_path))
    made: list[Search] = []

    def make(memory_gib: float | None = 3, own_memory: bool = False, **parts: Any) -> Search:
        job = spec(hardware={"memory_gib": memory_gib}, **parts)
        made.append(Search(tmp_path, job, facts(has_own_memory=own_memory, memory_bytes=64 << 30)))
        return made[-1]

    yield make
    for one in made:
        one.incumbent.close()
        one.bench.sandbox.close()


@pytest.mark.parametrize("pace", [0.95, 1.06])
def test_a_close_one_is_told_by_turns_whatever_the_pace_is_meanwhile(
    search: Callable[..., Search], pace: float
) -> None:
    made = search()
    assert seconds(made.trial("padded")) == 10.0 and made.alive() == ["padded"]
    made.pace(pace)
    found = made.trial("sorted")
    assert seconds(found) == pytest.approx(9.8), "two hundredths faster, whoever else used the machine"
    assert found.timing is not None and found.timing.low < 9.8 < found.timing.high
    assert found.notes[-1] == (
        "Took turns with the best so far: 1.020 times as fast, and by this ratio its seconds are told. "
        f"Alone it took {pace:.3f} times as long."
    )
    assert found.time_spent["turns"] > 0 and made.alive() == ["padded"], "the one by which others are told stays"
    again = made.trial("sorted")
    assert seconds(again) == pytest.approx(9.8) and made.alive() == ["padded"]


def test_only_what_is_surely_faster_takes_the_best_one_s_place() -> None:
    """Where each that seems faster did, thirty equal trials were told to be ever faster: only lucky ratios stayed."""
    best = measured(configuration(), 10.0)
    for seconds_of_it, spread, takes in ((9.8, 0.03, False), (9.8, 0.01, True), (10.1, 0.005, False)):
        other = measured(configuration(batching="sorted"), 10.0)
        other = other.model_copy(update={"timing": timing(seconds_of_it, spread)})
        assert incumbent_room._is_best(other, best, None) is takes, (seconds_of_it, spread)


def test_far_ones_take_no_turns(search: Callable[..., Search]) -> None:
    made = search()
    made.trial("padded")
    assert not made.trial("grouped").notes and made.alive() == ["padded"], "twice as slow"
    assert not made.trial("token-budget").notes and made.alive() == ["token-budget"], "twice as fast"


def test_one_that_takes_no_turns_is_told_at_the_pace_of_the_trials_before(search: Callable[..., Search]) -> None:
    """Or a slow one would become the best in a fast hour, and its seconds those that all others are held against."""
    made = search()
    made.trial("padded")
    made.pace(0.85)
    assert seconds(made.trial("sorted")) == pytest.approx(9.8), "in turns, by which the pace is known"
    found = made.trial("grouped")
    assert seconds(found) == pytest.approx(20.0) and made.alive() == ["padded"]
    assert found.notes == (
        "The machine was at another pace: its seconds were 0.850 times as long as they are told here.",
    )
    assert seconds(made.trial("token-budget")) == pytest.approx(5.0) and made.alive() == ["token-budget"]


def test_one_that_fails_in_its_turns_keeps_what_it_measured_alone(search: Callable[..., Search]) -> None:
    made = search()
    made.trial("padded")
    found = made.trial("packed")
    assert seconds(found) == 10.0 and made.alive() == []
    assert found.notes == ("It took no turns with the best so far: its process was ended by SIGSEGV",)
    assert not made.incumbent.stays
    made.trial("sorted")
    assert made.alive() == ["sorted"]


@pytest.mark.parametrize(
    "parts",
    [{"own_memory": True}, {"memory_gib": None}, {"search": {"objective": "memory"}}],
    ids=["a GPU's memory is all for the trial", "no cap on the host", "seconds are not what is searched for"],
)
def test_nothing_stays_where_it_would_be_in_the_way(search: Callable[..., Search], parts: dict[str, Any]) -> None:
    made = search(**parts)
    made.trial("padded")
    assert made.alive() == [] and not made.incumbent.stays


def test_it_ends_for_another_job_and_where_a_trial_needs_its_memory(
    search: Callable[..., Search], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = search()
    made.trial("padded")
    made.incumbent.end_unless_of("j")
    assert made.alive() == ["padded"]
    made.incumbent.end_unless_of("another")
    assert made.alive() == []
    made.trial("padded")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 << 30, available=int(3.2 * 2**30)))
    assert not made.trial("sorted").notes and made.alive() == ["sorted"], "a tenth is kept back, so 3 GiB are too much"


def test_what_is_clearly_slower_than_the_search_has_seen_does_not_stay(search: Callable[..., Search]) -> None:
    """After the best one's process has ended, another that is about as fast takes its place."""
    made = search()
    made.trial("padded", best_seconds=6.0)
    assert made.alive() == []
    made.trial("padded", best_seconds=9.5)
    assert made.alive() == ["padded"]


def test_the_pace_of_the_latest_turns_is_counted(search: Callable[..., Search]) -> None:
    """On a machine that is slower by more and more, close trials still meet, and none is given up for that."""
    made = search()
    made.trial("padded")
    for pace in (1.12, 1.25, 1.4):
        made.pace(pace)
        assert seconds(made.trial("sorted")) == pytest.approx(9.8)
        request = TrialRequest(configuration=configuration(), origin=Origin.search, number=1, best_seconds=9.8)
        assert made.incumbent.at_pace(request).best_seconds == pytest.approx(9.8 * pace)


def test_the_curve_is_told_at_the_same_pace() -> None:
    best, own = measured(configuration(), 10.0), measured(configuration(batching="sorted"), 12.0)
    own = own.model_copy(update={"curve": (timing(12.0), timing(15.0, micro=4))})
    told = in_turns(best, own, block(best, 11.0), block(own, 9.9))
    assert seconds(told) == pytest.approx(9.0), "ten seconds of the best one's, nine tenths of them"
    assert [one.seconds for one in told.curve] == pytest.approx([9.0, 11.25])


def test_a_real_trial_s_process_takes_turns_again_and_again(
    tmp_path: Path, llama: Path, functions: Path, facts: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny model's trials, of which each counts as close to the best one."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(incumbent_room, "CLOSE", 1e9)
    monkeypatch.setattr(incumbent_room, "FAR", 0.0)
    place = Workplace(device="cpu", data_roots=(tmp_path, llama.parent, functions.parent), hub_cache=tmp_path)
    bench = Bench(Sandbox(False), facts(memory_bytes=64 << 30), tmp_path, place)
    job = tiny.job(llama, functions)
    spec = job.model_copy(update={"hardware": job.hardware.model_copy(update={"memory_gib": 3.0})})
    incumbent, found = Incumbent(bench), []
    for number, batching in enumerate(("padded", "sorted", "padded")):
        made = configuration(batching=batching, precision="fp32", effective=8)
        request = TrialRequest(configuration=made, origin=Origin.search, number=number, curve=False, passes=1)
        found.append(measure(bench, spec, "j", request, print, lambda: False, None, incumbent=incumbent)[0])
    incumbent.close()
    bench.sandbox.close()
    notes = [one.notes[-1] if one is not None and one.notes else "" for one in found]
    assert all("Took turns with the best so far" in note for note in notes[1:]), notes
    assert not any("Took turns" in note for note in found[0].notes) if found[0] else False


def test_a_worker_gives_the_device_up_when_nothing_comes_or_another_waits(search: Callable[..., Search]) -> None:
    """The process holds the device's lock, so that the loop ends it."""
    made, held = search(), list[bool]()
    lock, other = (DeviceLock(made.folder / "locks", "cpu-0") for _ in range(2))

    def claim(number: int) -> TrialClaim:
        request = TrialRequest(configuration=configuration(), origin=Origin.search, number=number)
        return TrialClaim(task_id=f"t{number}", attempt=1, job_id="j", spec=made.spec, request=request)

    class Queue(FakeQueue):
        def finish_trial(self, claim: TrialClaim, measurement: Measurement, _log: str) -> None:
            self.ended[claim.task_id] = measurement
            if claim.task_id == "t2":
                assert not other.acquire(), "it waits from now on"

        def claim(self, worker: str, kinds: tuple[TaskKind, ...]) -> Claim | None:
            if TaskKind.trial in kinds:
                held.append(queue.loop._incumbent.stays)
            if self.ended.keys() == {"t1", "t2"} and TaskKind.plan in kinds:
                assert other.acquire(), "the device is free, and no process of the search is left"
                assert made.alive() == []
                other.release()
            return super().claim(worker, kinds)

    queue = Queue(*map(claim, (1, 2, 3)))
    queue.loop = Loop(queue, "w", made.bench, lock, 0)  # type: ignore[arg-type]
    queue.loop.run()
    assert queue.ended.keys() == {"t1", "t2", "t3"}
    assert held[:3] == [False, True, False], "between two trials it stays, unless another worker waits"
    assert made.alive() == [] and lock.acquire()
    lock.release()
