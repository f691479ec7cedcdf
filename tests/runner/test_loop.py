"""The worker's loop against a queue of this process: what fails ends its task with a reason, and never the worker."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.contract.child import Workplace
from service.contract.estimate import Estimate, EstimateRequest
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Outcome
from service.contract.states import Origin
from service.contract.task import Claim, EstimateClaim, PlanClaim, PlanInput, TaskKind, TrialClaim, TrialRequest
from service.errors import BadUpload, BrokerUnavailable, Misconfigured, NotOurs, OtherVersion
from tests.factory import configuration, measured
from worker.runner import lease
from worker.runner import loop as loop_room
from worker.runner.lock import DeviceLock
from worker.runner.loop import Loop
from worker.runner.measuring import Bench

SPEC = JobSpec.model_validate({"model": {"source": "org/model"}, "dataset": {"source": "org/data"}})
PLAN = PlanClaim(task_id="p", attempt=1, job_id="j", spec=SPEC)
TRIAL = TrialClaim(
    task_id="t",
    attempt=1,
    job_id="j",
    spec=SPEC,
    request=TrialRequest(configuration=configuration(), origin=Origin.recipe, number=1),
)
ESTIMATE = EstimateClaim(task_id="e", attempt=1, request=EstimateRequest(spec=SPEC, memory_gib=1))


class FakeQueue:
    """Gives out the claims in turn, and tells the loop to stop once all of them have ended."""

    def __init__(self, *claims: Claim) -> None:
        self.waiting, self.ended = list(claims), dict[str, Any]()
        self.loop: Loop
        self.renew: Callable[..., None] = lambda *_: None
        self.outages = 0

    def register(self, *_: object) -> None: ...

    def fetch(self, *_: Any) -> None:
        pass

    def reap(self) -> int:
        return 0

    def claim(self, _worker: str, kinds: tuple[TaskKind, ...]) -> Claim | None:
        if not self.waiting:
            self.loop.stop()
            return None
        return self.waiting.pop(0) if self.waiting[0].kind in kinds else None

    def plan_input(self, claim: PlanClaim) -> Any:
        return PlanInput.model_construct(spec=claim.spec)

    def finish_estimate(self, claim: EstimateClaim, estimate: Estimate) -> None:
        if self.outages > 0:
            self.outages -= 1
            raise BrokerUnavailable("away")
        self.ended[claim.task_id] = estimate

    def finish_trial(self, claim: TrialClaim, measurement: Measurement, log: str) -> None:
        self.ended[claim.task_id] = measurement

    def fail(self, claim: Claim, reason: str, log: str = "") -> None:
        self.ended[claim.task_id] = reason

    def release(self, claim: Claim) -> None:
        self.ended[claim.task_id] = "released"


@pytest.fixture
def work(tmp_path: Path, facts: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeQueue]:
    """Has a loop do these claims."""
    monkeypatch.setattr(lease, "WISH_SECONDS", 0.01)
    monkeypatch.setattr(loop_room, "IDLE_SECONDS", (0.001, 0.01))
    monkeypatch.setattr(loop_room, "REST_SECONDS", 0.1)

    def go(queue: FakeQueue) -> FakeQueue:
        place = Workplace(device="cpu", data_roots=(tmp_path,), hub_cache=tmp_path)
        sandbox: Any = SimpleNamespace(printed=lambda: "", forget_output=lambda: None)  # nothing in here starts a child
        bench = Bench(sandbox, facts(), tmp_path, place)
        queue.loop = Loop(queue, "w", bench, DeviceLock(tmp_path / "locks", "cpu-0"), 0)  # type: ignore[arg-type]
        queue.loop.run()
        return queue

    return go


def test_an_estimate_is_computed_once_however_often_its_write_is_repeated(
    work: Callable[..., FakeQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = Estimate(memory_gib=1, max_length=8, device="cpu", methods={}, seconds=0.1, statement="none")
    asked: list[str] = []

    def answer(_bench: Bench, claim: EstimateClaim, *_: object) -> Estimate:
        asked.append(claim.task_id)
        return answered

    monkeypatch.setattr(loop_room, "answer", answer)
    queue = FakeQueue(ESTIMATE)
    queue.outages = 3
    assert work(queue).ended == {"e": answered} and asked == ["e"] and queue.outages == 0


def test_a_mistake_in_the_plan_ends_its_task_and_the_worker_goes_on(
    work: Callable[..., FakeQueue], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("worker.plan.plan", broken)
    ended = work(FakeQueue(PLAN, PLAN.model_copy(update={"task_id": "q"}))).ended
    said = "The worker failed: ZeroDivisionError: division by zero; its log says where."
    assert ended == {"p": said, "q": said} and "in broken" in capsys.readouterr().err


def test_a_task_whose_children_something_ends_is_handed_back_once(
    work: Callable[..., FakeQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time its lease runs out, which counts as a death: what sends SIGTERM may do so for ever."""
    monkeypatch.setattr(loop_room, "measure", lambda *_, **__: (None, ""))
    queue, released = FakeQueue(TRIAL, TRIAL, TRIAL.model_copy(update={"task_id": "other"})), list[str]()
    queue.release = lambda claim: released.append(claim.task_id)  # type: ignore[method-assign]
    work(queue)
    assert released == [TRIAL.task_id, "other"]


@pytest.mark.parametrize("why", ["the job was cancelled", "the worker's time is up"])
def test_a_task_that_is_over_stops_fetching_its_data(work: Callable[..., FakeQueue], why: str) -> None:
    queue = FakeQueue(TRIAL)

    def fetch(*_: Any) -> None:
        assert queue.loop._lease is not None
        if why == "the job was cancelled":
            queue.loop._lease.over.set()  # as the heartbeat does
        else:
            queue.loop.stay._end = 0.0
        raise BrokerUnavailable("what arrived was damaged")

    queue.fetch = fetch  # type: ignore[method-assign]
    assert work(queue).ended == {"t": "released"}


def test_a_control_plane_of_another_version_costs_no_task(
    work: Callable[..., FakeQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While control planes are replaced one by one, some renewals reach one of another version."""
    renewed = threading.Event()

    def measure(*args: Any, **more: Any) -> tuple[Measurement, str]:
        assert renewed.wait(10)
        assert not args[5](), "the lease still holds"
        return Measurement(configuration=configuration(), outcome=Outcome.ok), ""

    def renew(*_: object) -> None:
        renewed.set()
        raise OtherVersion("control plane is 2, the worker is 1")

    monkeypatch.setattr(lease, "WISH_SECONDS", 0.01)
    monkeypatch.setattr(loop_room, "measure", measure)
    queue = FakeQueue(TRIAL)
    queue.renew = renew
    assert isinstance(work(queue).ended["t"], Measurement)


def test_an_error_of_the_heartbeat_ends_the_task_with_its_reason(
    work: Callable[..., FakeQueue], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*args: Any, **more: Any) -> tuple[None, str]:
        ended = args[5]
        for _ in range(1000):  # until the lease says so, as a child's sandbox does; 10 s at most
            if ended():
                return None, ""
            threading.Event().wait(0.01)
        raise AssertionError("nobody ended the trial")

    def renew(*_: object) -> None:
        raise ValueError("a lease that cannot be read")

    monkeypatch.setattr(loop_room, "measure", measure)
    queue = FakeQueue(TRIAL)
    queue.renew = renew
    assert "ValueError: a lease that cannot be read" in work(queue).ended["t"]
    assert "in renew" in capsys.readouterr().err


def test_with_too_little_disk_nothing_is_claimed_until_there_is_more(
    work: Callable[..., FakeQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that fails what it claims is the first to be free again: it would fail all jobs of the queue."""
    sentences: list[str | None] = ["too little disk", "too little disk", None]
    said: list[str] = []
    monkeypatch.setattr(loop_room, "disk_problem", lambda *_: sentences.pop(0) if sentences else None)
    monkeypatch.setattr(loop_room, "measure", lambda *_, **__: (measured(configuration()), ""))
    monkeypatch.setattr(loop_room.log, "warning", lambda _, **told: said.append(told["reason"]))
    queue = work(FakeQueue(TRIAL))
    assert isinstance(queue.ended["t"], Measurement) and not sentences
    assert said == ["too little disk"], "said once"


def test_a_damaged_upload_fails_its_job(work: Callable[..., FakeQueue]) -> None:
    """Asked for again it would be the same, and the worker would serve nobody."""
    queue = FakeQueue(TRIAL)

    def fetch(*_: Any) -> None:
        raise BadUpload("What arrived has another digest.")

    queue.fetch = fetch  # type: ignore[method-assign]
    work(queue)
    assert "is damaged where the control plane keeps it: What arrived has another digest" in queue.ended["t"]


def test_an_upload_that_does_not_fit_is_handed_back_once(work: Callable[..., FakeQueue]) -> None:
    """Another worker may have the room. A second time this one is the only one, and the job would wait for ever."""
    queue, tried, released = FakeQueue(TRIAL, TRIAL), list[str](), list[str]()

    def fetch(source: str, _folder: Path) -> None:
        tried.append(source)
        raise OSError(errno.ENOSPC, "No space left on device")

    queue.fetch = fetch  # type: ignore[method-assign]
    queue.release = lambda claim: released.append(claim.task_id)  # type: ignore[method-assign]
    began = time.monotonic()
    work(queue)
    assert len(tried) == 2 and released == ["t"] and "does not fit on the disk" in queue.ended["t"]
    assert time.monotonic() - began >= loop_room.REST_SECONDS, "it leaves the task to others for so long"


def test_a_worker_that_is_refused_ends_with_the_reason(work: Callable[..., FakeQueue]) -> None:
    """As when its key is revoked: it cannot say that the task failed either, which is nobody's fault."""
    queue = FakeQueue(TRIAL)

    def fetch(*_: Any) -> None:
        raise Misconfigured("refuses this worker")

    queue.fetch = fetch  # type: ignore[method-assign]
    with pytest.raises(Misconfigured):
        work(queue)
    assert not queue.ended


def test_a_worker_whose_results_a_proxy_refuses_ends(
    work: Callable[..., FakeQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed one job after the other, as the first to be free again. Its lease runs out, which counts as a death."""
    monkeypatch.setattr(loop_room, "measure", lambda *_, **__: (measured(configuration()), ""))
    queue = FakeQueue(TRIAL, TRIAL)

    def finish_trial(*_: Any) -> None:
        raise Misconfigured("A proxy takes no bodies of this size")

    queue.finish_trial = finish_trial  # type: ignore[method-assign, assignment]
    with pytest.raises(Misconfigured):
        work(queue)
    assert queue.ended == {} and len(queue.waiting) == 1


@pytest.mark.parametrize("kind", [PLAN, TRIAL], ids=["plan", "trial"])
def test_what_a_worker_cannot_read_is_handed_back_and_left_to_others_for_a_while(
    work: Callable[..., FakeQueue], monkeypatch: pytest.MonkeyPatch, kind: Claim
) -> None:
    """Claimed again at once, it would be all that the worker does; kept, nobody else could do it."""
    monkeypatch.setattr(loop_room, "measure", lambda *_, **__: (measured(configuration()), ""))
    monkeypatch.setattr(loop_room, "IDLE_SECONDS", (0.1, 0.1))
    queue, tried = FakeQueue(kind), list[float]()

    def not_ours(*_: Any) -> Any:
        tried.append(time.monotonic())
        raise NotOurs("another version wrote job j")

    def release(claim: Claim) -> None:
        if len(tried) < 3:
            queue.waiting.append(claim)

    queue.plan_input = not_ours  # type: ignore[method-assign, assignment]
    queue.finish_trial = not_ours  # type: ignore[method-assign, assignment]
    queue.release = release  # type: ignore[method-assign]
    work(queue)
    assert len(tried) == 3 and not queue.ended
    assert all(later - former >= 0.06 for former, later in itertools.pairwise(tried)), "it pauses"


@pytest.mark.parametrize("problem", [OtherVersion("another version"), BrokerUnavailable("away")])
def test_a_worker_that_was_told_to_end_does_not_wait_for_ever_with_a_result(
    work: Callable[..., FakeQueue], monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    """Nor does it keep the device: a service's manager would wait for its own limit, and kill it."""
    monkeypatch.setattr(loop_room, "measure", lambda *_, **__: (measured(configuration()), ""))
    queue, tried = FakeQueue(TRIAL), [0]

    def finish_trial(*_: Any) -> None:
        tried[0] += 1
        queue.loop.patience.seconds = 0.05
        queue.loop.stop()
        raise problem

    queue.finish_trial = finish_trial  # type: ignore[method-assign, assignment]
    work(queue)
    assert not queue.ended and tried[0] >= (1 if isinstance(problem, OtherVersion) else 2)


def test_a_device_that_another_process_keeps_is_told(
    work: Callable[..., FakeQueue], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other, said = DeviceLock(tmp_path / "locks", "cpu-0"), list[str]()
    monkeypatch.setattr(loop_room, "USUAL_WAIT", 0.05)
    monkeypatch.setattr(loop_room, "measure", lambda *_, **__: (measured(configuration()), ""))

    def warning(_: str, **told: Any) -> None:
        said.append(told["reason"])
        other.release()

    monkeypatch.setattr(loop_room.log, "warning", warning)
    assert other.acquire()
    assert isinstance(work(FakeQueue(TRIAL)).ended["t"], Measurement)
    (reason,) = said
    assert reason.startswith(f"The device is in use by process {os.getpid()} (it holds {tmp_path / 'locks'}")


def test_a_short_outage_ends_nothing(work: Callable[..., FakeQueue], monkeypatch: pytest.MonkeyPatch) -> None:
    renewed = threading.Event()
    calls: list[int] = []

    def renew(*_: object) -> None:
        calls.append(1)
        if len(calls) < 3:
            raise BrokerUnavailable("away")
        renewed.set()

    def answer(*_: object) -> Estimate:
        assert renewed.wait(10)
        return Estimate(memory_gib=1, max_length=8, device="cpu", methods={}, seconds=0.1, statement="none")

    monkeypatch.setattr(loop_room, "answer", answer)
    queue = FakeQueue(ESTIMATE)
    queue.renew = renew
    assert isinstance(work(queue).ended["e"], Estimate)
