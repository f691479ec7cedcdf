"""How long a worker stays: by an injected clock in this process, and by real time in processes of their own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from service.contract.child import Workplace
from service.contract.duration import seconds_of
from service.contract.task import Claim, TaskKind, TrialClaim
from service.errors import BrokerUnavailable, Misconfigured
from service.models import Task
from service.queue import Queue
from tests.processes import start_worker, until
from tests.runner.test_loop import ESTIMATE, PLAN, TRIAL, FakeQueue
from worker.runner import lease
from worker.runner import loop as loop_room
from worker.runner.lock import DeviceLock
from worker.runner.loop import Loop
from worker.runner.measuring import Bench, JobFailed
from worker.runner.stay import Stay, Terms, moment, spelled_out

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC).timestamp()


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Office(FakeQueue):
    """A queue that never ends its worker; each look at it when it is empty takes a minute."""

    def __init__(self, clock: Clock, *claims: Claim, away: int = 0) -> None:
        super().__init__(*claims)
        self.clock, self.away, self.looks = clock, away, 0

    def claim(self, worker: str, kinds: tuple[TaskKind, ...]) -> Claim | None:
        if self.waiting:
            return super().claim(worker, kinds)
        if TaskKind.trial in kinds:
            self.clock.now += 60
            self.looks += 1
            assert self.looks < 100, "the worker does not end"
            if self.away:
                self.away -= 1
                raise BrokerUnavailable("away")
        return None


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stay(
    tmp_path: Path, facts: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> Callable[..., Office]:
    """Has a worker stay under these terms, until it ends by itself."""
    monkeypatch.setattr(lease, "WISH_SECONDS", 0.01)
    monkeypatch.setattr(loop_room, "IDLE_SECONDS", (0.001, 0.001))

    def go(terms: Terms, *claims: Claim, away: int = 0) -> Office:
        office = Office(clock, *claims, away=away)
        place = Workplace(device="cpu", data_roots=(tmp_path,), hub_cache=tmp_path)
        sandbox: Any = SimpleNamespace(printed=lambda: "", forget_output=lambda: None)  # nothing in here starts a child
        bench = Bench(sandbox, facts(), tmp_path, place)
        lock = DeviceLock(tmp_path / "locks", "cpu-0")
        office.loop = Loop(office, "w", bench, lock, 0, Stay(terms, clock, lambda: NOON))  # type: ignore[arg-type]
        office.loop.run()
        return office

    return go


def trial(expected: float) -> TrialClaim:
    return TRIAL.model_copy(update={"request": TRIAL.request.model_copy(update={"expected_seconds": expected})})


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[str]:
    """Trials that take ten minutes, minute by minute, and then fail their job; the endings of those that ran."""
    ran: list[str] = []

    def measure(*args: Any, **more: Any) -> tuple[None, str]:
        ended = args[5]
        for _ in range(10):
            clock.now += 60
            if ended():
                ran.append("ended")
                return None, ""
        ran.append("done")
        raise JobFailed("done")

    monkeypatch.setattr(loop_room, "measure", measure)
    return ran


def test_a_worker_without_tasks_ends_after_its_minutes(
    stay: Callable[..., Office], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dynotune")
    office = stay(Terms(idle_minutes=3))
    assert office.looks == 3 and not office.loop.told_to_end
    assert "it had no task for 3 min" in caplog.text
    assert stay(Terms(idle_minutes=0)).looks == 1


def test_the_minutes_count_from_the_last_task(stay: Callable[..., Office], measured: list[str]) -> None:
    office = stay(Terms(idle_minutes=3), TRIAL, TRIAL)
    assert measured == ["done", "done"] and office.looks == 3, "the ten minutes of a trial are not idle"


def test_an_outage_of_the_queue_is_not_idleness(stay: Callable[..., Office]) -> None:
    assert stay(Terms(idle_minutes=3), away=5).looks == 5 + 3


def test_no_task_is_begun_that_is_not_expected_to_end_in_time(
    stay: Callable[..., Office], measured: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dynotune")
    office = stay(Terms(until=NOON + 900), trial(600), trial(301), trial(1))
    assert measured == ["done"] and office.ended == {"t": "released"} and len(office.waiting) == 1
    assert "the next task takes about 301 s, and 300 s are left" in caplog.text


@pytest.mark.parametrize(("claim", "seconds"), [(PLAN, 4), (ESTIMATE, 109)], ids=["plan", "estimate"])
def test_nor_a_plan_or_an_estimate(stay: Callable[..., Office], claim: Claim, seconds: int) -> None:
    assert stay(Terms(until=NOON + seconds), claim).ended == {claim.task_id: "released"}


def test_what_runs_when_the_time_is_over_is_handed_back(stay: Callable[..., Office], measured: list[str]) -> None:
    office = stay(Terms(until=NOON + 300), TRIAL, TRIAL)
    assert measured == ["ended"] and office.ended == {"t": "released"} and len(office.waiting) == 1


def test_an_idle_worker_ends_at_its_time(stay: Callable[..., Office]) -> None:
    assert stay(Terms(until=NOON + 300)).looks == 5


@pytest.mark.parametrize(("grace", "ending"), [(180, "ended"), (0, "ended"), (660, "done"), (None, "done")])
def test_after_sigterm_a_task_has_its_grace_period(
    stay: Callable[..., Office],
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    grace: float | None,
    ending: str,
) -> None:
    run = Loop._run

    def told(self: Loop, *args: Any) -> None:
        self.stop()
        run(self, *args)

    monkeypatch.setattr(Loop, "_run", told)
    office = stay(Terms(grace_seconds=grace), TRIAL, TRIAL)
    assert measured == [ending] and len(office.waiting) == 1 and office.loop.told_to_end
    assert office.ended == {"t": "released" if ending == "ended" else "done"}


def test_a_lost_result_keeps_nobody_past_the_time(
    stay: Callable[..., Office], measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise BrokerUnavailable("away")

    monkeypatch.setattr(Office, "fail", fail, raising=False)
    monkeypatch.setattr(Stay, "why_not", lambda *_: None)
    done = threading.Thread(target=stay, args=(Terms(until=NOON + 599), TRIAL), daemon=True)
    done.start()
    done.join(20)
    assert not done.is_alive() and measured


def test_times_are_iso_or_durations() -> None:
    assert seconds_of("3h50m") == 13800 and seconds_of("1d1s") == 86401 and seconds_of(" 90m ") == 5400
    assert moment("3h50m", NOON) == NOON + 13800
    assert moment("2026-11-23T13:00:00Z", NOON) == moment("2026-11-23T14:00+01:00", NOON) == NOON + 3600
    here = datetime.fromtimestamp(NOON + 60).isoformat()
    assert moment(here, NOON) == NOON + 60, "a time without a zone is this machine's"
    for text in ("", "50m3h", "soon", "3", "-1h", "1h2", "9999999999d", "2026-13-01"):
        with pytest.raises(Misconfigured, match="is no time; write"):
            moment(text, NOON)
    with pytest.raises(Misconfigured, match="has passed"):
        moment("2026-11-23T11:59:59Z", NOON)


def test_minutes_may_be_left_out() -> None:
    assert spelled_out(["--exit-when-idle"]) == ["--exit-when-idle", "5"]
    assert spelled_out(["--exit-when-idle", "--until", "1h"]) == ["--exit-when-idle", "5", "--until", "1h"]
    assert spelled_out(["--until", "1h", "--exit-when-idle", "0.5"]) == ["--until", "1h", "--exit-when-idle", "0.5"]


def test_the_workers_of_several_devices_are_given_the_terms() -> None:
    terms = Terms(idle_minutes=2.5, until=NOON, grace_seconds=15)
    options = ["--exit-when-idle", "2.5", "--until", "2026-11-23T12:00:00+00:00", "--grace", "15"]
    assert terms.options() == options and Terms().options() == []
    assert moment(options[3], NOON - 1) == NOON


# Real processes


@pytest.fixture
def busy(
    queue: Queue, engine: Engine, database_url: str, tmp_path: Path, facts: Callable[..., Any], spec: Callable[..., Any]
) -> Callable[..., Any]:
    """A worker with these options, whose trial hangs."""

    def go(*options: str) -> Any:
        queue.submit(spec())
        worker = start_worker(tmp_path, database_url, facts(), "hang", options=options)
        until(lambda: any(task.progress for task in tasks(engine)), 60, "a running trial")
        return worker

    return go


def tasks(engine: Engine) -> list[Task]:
    with Session(engine) as session:
        return list(session.scalars(select(Task).where(Task.kind == "trial")))


def handed_back(engine: Engine) -> bool:
    (task,) = tasks(engine)
    return task.state == "queued" and task.deaths == 0 and task.worker_id is None


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_process_ends_when_nothing_is_left(
    queue: Queue, engine: Engine, database_url: str, tmp_path: Path, facts: Callable[..., Any], spec: Callable[..., Any]
) -> None:
    queue.submit(spec(search={"trials": 2, "verify": "quick"}))
    worker = start_worker(tmp_path, database_url, facts(), "quick", options=("--exit-when-idle", "0", "--until", "1h"))
    assert worker.wait(120) == 0
    assert {task.state for task in tasks(engine)} == {"done"}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_scheduler_may_send_sigterm_to_every_process(busy: Callable[..., Any], engine: Engine) -> None:
    worker = busy("--grace", "0")
    for process in [*psutil.Process(worker.pid).children(recursive=True), worker]:
        process.send_signal(signal.SIGTERM)
    assert worker.wait(30) == 128 + signal.SIGTERM and handed_back(engine), "a trial that was ended has not crashed"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_trial_ended_from_outside_is_run_again(busy: Callable[..., Any], engine: Engine) -> None:
    worker = busy()
    try:
        (first,) = tasks(engine)
        children = psutil.Process(worker.pid).children(recursive=True)
        for process in children:
            process.send_signal(signal.SIGTERM)
        until(lambda: tasks(engine)[0].attempt > first.attempt, 30, "the trial's second attempt")
        assert tasks(engine)[0].deaths == 0
        assert {process.pid for process in psutil.Process(worker.pid).children()} & {one.pid for one in children}, (
            "the fork server lives on"
        )
    finally:
        worker.send_signal(signal.SIGINT)
        assert worker.wait(30) == 0
