"""`dynotune tune` and `estimate` with a worker that is missing, unfit or dead: they end, and leave nothing behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from sqlalchemy import select
from sqlalchemy.orm import Session

from service.cli import embedded, estimate_command
from service.cli import tune as room
from service.cli.embedded import LocalWorker
from service.client import Client
from service.contract.hardware import HardwareFacts
from service.contract.recommendation import Recommendation
from service.contract.views import TrialList
from service.db import connect
from service.errors import Misconfigured
from service.models import Job
from service.queue import Queue
from service.settings import Settings
from tests import tiny
from tests.service.test_api import run_trial


class Worker:
    """Stands in for the local worker: registers, and records the statuses of the jobs at the time it is stopped."""

    facts: HardwareFacts | None = None
    returncode: int | None = None
    check = LocalWorker.check
    seen: list[tuple[str, list[str]]]

    def __init__(self, settings: Settings) -> None:
        self.url = settings.database_url
        self.process = SimpleNamespace(poll=lambda: self.returncode, returncode=self.returncode)
        if self.facts:
            engine = connect(self.url)
            Queue(engine).register("w", 1, self.facts)
            engine.dispose()

    def stop(self) -> None:
        engine = connect(self.url)
        with Session(engine) as session:
            self.seen.append((self.url, list(session.scalars(select(Job.status)))))
        engine.dispose()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> type[Worker]:
    made = type("Fresh", (Worker,), {"seen": []})
    monkeypatch.setattr(room, "LocalWorker", made)
    return made


@pytest.fixture
def tune(tmp_path: Path) -> Callable[..., int]:
    folder = tmp_path / "job"
    folder.mkdir()
    body = tiny.job(folder)

    def go(output: Path | None = None, **changes: Any) -> int:
        (folder / "job.json").write_text(json.dumps(body | changes))
        return room.tune(folder / "job.json", output or tmp_path / "out", False, Console())

    return go


def test_every_run_has_a_database_of_its_own(tune: Callable[..., int], worker: type[Worker], tmp_path: Path) -> None:
    worker.returncode = 1
    for _ in range(2):
        with pytest.raises(SystemExit, match="ended by itself"):
            tune()
    (first, one), (second, other) = worker.seen
    assert first != second and one == other == ["cancelled"]
    assert list((tmp_path / "home").iterdir()) == []


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local worker that is killed before it has done anything, as by the system when memory runs out."""
    monkeypatch.setattr(embedded, "WORKER", (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))


@pytest.mark.usefixtures("killed")
def test_a_run_whose_worker_was_killed_ends(tune: Callable[..., int]) -> None:
    with pytest.raises(SystemExit, match=r"the local worker was killed by SIGKILL \(exit code -9\)"):
        tune()


@pytest.mark.usefixtures("killed")
def test_an_estimate_whose_worker_was_killed_ends(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(tiny.job(tmp_path)))
    with pytest.raises(SystemExit, match="the local worker was killed by SIGKILL"):
        estimate_command.estimate(tmp_path / "job.json", "1GiB", None, False, Console())


def test_an_estimate_says_that_it_waits_for_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    found: list[Any] = []
    client: Any = SimpleNamespace(workers=lambda: found)
    look = estimate_command.told_of_no_worker(client)
    for _ in range(2):
        look(None)
    assert capsys.readouterr().err.count("No worker is connected, so the estimate waits") == 1
    found.append(SimpleNamespace(alive=True))
    estimate_command.told_of_no_worker(client)(None)
    assert not capsys.readouterr().err


def test_a_folder_that_looks_like_two_is_refused(tmp_path: Path) -> None:
    """Folders are handed to the worker as PATH has them, so it would read two folders that nobody named."""
    job = tiny.job(tmp_path) | {"model": {"source": "/models/a:b/model"}}
    with (
        pytest.raises(Misconfigured, match=r"/models/a:b: the name of a folder .* must not contain ':'"),
        room.private(Settings(home=tmp_path), job),
    ):
        pass


def test_an_interrupted_run_leaves_nothing(
    tune: Callable[..., int],
    worker: type[Worker],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(room, "_follow", interrupt)
    assert tune() == 130
    assert [statuses for _, statuses in worker.seen] == [["cancelled"]]
    assert "cancelled" in capsys.readouterr().err and list((tmp_path / "home").iterdir()) == []


def test_an_interrupted_run_writes_its_best_so_far(
    tune: Callable[..., int],
    worker: type[Worker],
    facts: Callable[..., HardwareFacts],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The control plane is not asked to write them: where it answers too late, all that was measured would be lost."""
    worker.facts = facts()
    monkeypatch.delattr(Client, "export")

    def follow(_client: object, local: Worker, *_: object) -> None:
        engine = connect(local.url)
        run_trial(Queue(engine), 8.0, 1)
        engine.dispose()
        raise KeyboardInterrupt

    monkeypatch.setattr(room, "_follow", follow)
    assert tune() == 130
    assert [statuses for _, statuses in worker.seen] == [["succeeded"]]
    best = Recommendation.model_validate_json((tmp_path / "out" / "recommendation.json").read_text())
    assert best.stability.stable is None and "stopped before it had ended" in " ".join(best.notes)
    assert "not verified" in (tmp_path / "out" / "train.py").read_text()
    (trial,) = TrialList.model_validate_json((tmp_path / "out" / "trials.json").read_text()).items
    assert trial.measurement and trial.configuration.levers == best.configuration.levers
    assert "a second Ctrl-C ends at once" in capsys.readouterr().err


def test_a_second_interrupt_ends_at_once(
    tune: Callable[..., int], worker: type[Worker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(room, "_follow", interrupt)
    monkeypatch.setattr(Client, "job", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tune()
    assert [statuses for _, statuses in worker.seen] == [["cancelled"]]
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("hardware", "words"),
    [({"device": "cuda"}, "is a cpu worker, the job wants cuda"), ({"memory_gib": 64}, "wants 64")],
)
def test_a_job_that_the_only_worker_can_never_serve_ends(
    tune: Callable[..., int], worker: type[Worker], facts: Callable[..., HardwareFacts], hardware: Any, words: str
) -> None:
    worker.facts = facts()
    with pytest.raises(SystemExit, match=words):
        tune(hardware=hardware)
    assert [statuses for _, statuses in worker.seen] == [["cancelled"]]


def test_before_the_worker_is_there_nobody_is_told_to_start_one(
    tune: Callable[..., int], worker: type[Worker], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    polls = iter([None, None, 1])
    monkeypatch.setattr(worker, "__init__", lambda self, settings: setattr(self, "url", settings.database_url))
    monkeypatch.setattr(worker, "process", SimpleNamespace(poll=lambda: next(polls), returncode=1), raising=False)
    monkeypatch.setattr(room, "POLL_SECONDS", 0.01)
    with pytest.raises(SystemExit):
        tune()
    said = capsys.readouterr().out
    assert said.count("the local worker starts") == 1 and "No worker is connected" not in said


def test_a_symlink_on_the_command_line_may_be_followed(
    tune: Callable[..., int], worker: type[Worker], tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "links").mkdir()
    tiny.data(tmp_path / "elsewhere" / "data.jsonl", 5)
    (tmp_path / "links" / "data.jsonl").symlink_to(tmp_path / "elsewhere" / "data.jsonl")
    worker.returncode = 1
    with pytest.raises(SystemExit, match="ended by itself"):
        tune(dataset={"source": str(tmp_path / "links" / "data.jsonl"), "max_length": 64})
