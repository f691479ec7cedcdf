"""The sandbox: every way a child can end is a typed ending, and nothing is left behind."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from service.contract.child import MESSAGE, OUTPUT, EndingKind, Progress, Result, RunTrial, Workplace
from service.contract.job import JobSpec
from service.contract.measurement import Outcome
from service.contract.states import Origin
from service.contract.task import TrialRequest
from tests.conftest import ROOT
from tests.factory import configuration, measured
from worker.runner import sandbox
from worker.runner.measuring import Bench, measure
from worker.runner.sandbox import Sandbox

TRIAL = TrialRequest(configuration=configuration(), origin=Origin.recipe, number=1, seconds_limit=120)
SPEC = JobSpec.model_validate({"model": {"source": "org/model"}, "dataset": {"source": "org/data"}})


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def workplace(folder: Path = Path("/nowhere")) -> Workplace:
    return Workplace(device="cpu", data_roots=(folder,), hub_cache=folder)


def asked() -> RunTrial:
    return RunTrial(workplace=workplace(), spec=SPEC, trial=TRIAL)


@pytest.fixture
def run() -> Iterator[Any]:
    """Runs a stub child."""
    made: list[Sandbox] = []

    def go(entry: str, seconds: float = 120, ended: Any = lambda: False, on_message: Any = lambda _: None) -> Any:
        made.append(Sandbox(False, f"tests.stubs:{entry}"))
        return made[-1].run(asked(), seconds, on_message, ended)

    yield go
    for one in made:
        one.close()


def test_a_result(run: Any) -> None:
    ending = run("quick")
    assert ending.kind is EndingKind.result and isinstance(ending.last, Result)
    assert ending.last.measurement and ending.last.measurement.outcome is Outcome.ok
    assert ending.seen == [Progress(text="stub")]


def test_a_result_that_comes_as_the_wait_gives_up_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process sends its result and ends after `wait` has found nothing, and before its exit code is asked for."""
    ours, theirs = multiprocessing.Pipe()
    process = SimpleNamespace(pid=os.getpid(), sentinel=None, exitcode=None, join=lambda _: None)

    def gives_up(*_: Any) -> list[Any]:
        theirs.send_bytes(Result().model_dump_json().encode())
        theirs.close()
        process.exitcode = 0
        monkeypatch.setattr(sandbox, "wait", lambda *_: [ours])
        return []

    monkeypatch.setattr(sandbox, "wait", gives_up)
    (tmp_path / OUTPUT).touch()
    ending = sandbox.Child(process, ours, tmp_path, MESSAGE).watch(60, lambda _: None, lambda: False)
    assert ending.kind is EndingKind.result and isinstance(ending.last, Result)


def test_a_segfault_is_named_and_its_last_words_kept(run: Any, tmp_path: Path) -> None:
    ending = run("segfault")
    assert ending.kind == "signal" and "SIGSEGV" in ending.reason and "last words" in ending.log
    assert not list(tmp_path.glob("dynotune-trial-*"))


def test_a_silent_exit_is_told(run: Any) -> None:
    ending = run("silent")
    assert ending.kind == "exit" and "7" in ending.reason


def test_nothing_that_a_child_says_is_unpickled(run: Any, tmp_path: Path) -> None:
    ending = run("hostile")
    assert ending.kind is EndingKind.malformed and "cannot be read" in ending.reason
    assert not (tmp_path / "locks").exists()


def test_figures_survive_the_way(run: Any) -> None:
    """Losses that are not finite are what a verdict looks at, and JSON has no numbers for them."""
    made = measured(configuration(), losses=(float("nan"), float("inf"), 1e-30), grad_norms=(None, float("-inf"), 2.5))
    again = MESSAGE.validate_json(Result(measurement=made).model_dump_json())
    assert isinstance(again, Result) and repr(again.measurement) == repr(made)


@pytest.mark.parametrize("entry", ["hang", "stubborn"])
def test_a_hang_is_ended_with_all_its_children(run: Any, monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    told: list[str] = []
    # The limit passes once the child has spoken, however long a busy machine takes until then.
    monkeypatch.setattr("worker.runner.sandbox.time", SimpleNamespace(monotonic=lambda: 1e6 if told else 0.0))
    ending = run(entry, on_message=lambda message: told.append(message.text))
    assert ending.kind == "timed_out" and told
    assert ending.reason == f"it ran past its time limit and was killed while {told[0]}"
    assert _left(told[0]) == []


def test_a_child_that_stops_within_a_message_is_ended(run: Any) -> None:
    """By its limit, and by a user who cancels: the worker does not wait for the rest of the message."""
    assert run("stammering", seconds=2).kind == "timed_out"
    started = time.monotonic()
    assert run("stammering", ended=lambda: time.monotonic() > started + 2).kind == "ended"


def test_what_a_first_child_downloads_takes_nothing_of_its_time(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def seen(message: Any) -> None:
        if message.kind == "preparing":
            now[0] += 80_000

    monkeypatch.setattr("worker.runner.sandbox.time", SimpleNamespace(monotonic=lambda: now[0]))
    assert run("prepares", on_message=seen).kind is EndingKind.result


def test_it_ends_when_told_to(run: Any) -> None:
    told: list[str] = []
    ending = run("hang", ended=lambda: bool(told), on_message=lambda message: told.append(message.text))
    assert ending.kind == "ended"
    assert _left(told[0]) == []


def test_one_that_prints_without_end_is_ended(run: Any, tmp_path: Path) -> None:
    ending = run("flooding")
    assert ending.kind is EndingKind.out_of_disk and "printed more than 256 MiB" in ending.reason
    assert len(ending.log) == 64 << 10 and not list(tmp_path.glob("dynotune-trial-*"))


def test_what_a_process_prints_while_its_output_is_read_does_not_make_the_log_longer(monkeypatch: Any) -> None:
    class Growing(io.BytesIO):
        def tell(self) -> int:
            return 100 << 10

    monkeypatch.setattr(Path, "open", lambda *_: Growing(b"x" * (200 << 10)))
    assert sandbox._tail(Path("output")) == "x" * sandbox.TAIL_BYTES


def test_one_that_fills_the_disk_is_ended(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    free = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=1 << 20 if told else 1 << 40))
    monkeypatch.setattr("worker.runner.watchdog.shutil", free)
    ending = run("hang", on_message=lambda message: told.append(message.text))
    assert ending.kind is EndingKind.out_of_disk and "only 1 MiB of disk" in ending.reason
    assert _left(told[0]) == []


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _left(pids: str) -> list[int]:
    """Those of the processes that are still there once a SIGKILL has had time to arrive."""
    found = [psutil.Process(pid) for pid in map(int, pids.split()) if _alive(pid)]
    _, left = psutil.wait_procs(found, timeout=10)
    return [process.pid for process in left if _alive(process.pid)]


def test_outcomes_become_measurements(spec: Any, facts: Any, tmp_path: Path) -> None:
    """A segfault, a hang, an endless allocation, a silent end: typed outcomes, and the worker goes on.

    All are children of one fork server, as in a worker, which has imported what the real entry needs."""
    outcomes, reasons = {}, {}
    for entry in (
        "segfault",
        "hang",
        "greedy",
        "silent",
        "quick",
        "escaping",
        "illegal",
        "panic",
        "aborting",
        "without_threads",
        "without_pages",
        "cramped",
        "babbling",
    ):
        sandbox = Sandbox(False, f"tests.stubs:{entry}", preload=("worker.child.entry", "worker.child.measure"))
        bench = Bench(sandbox, facts(), tmp_path, workplace(tmp_path))
        trial = TRIAL.model_copy(update={"seconds_limit": 2.0 if entry == "hang" else 60.0})
        measurement, _ = measure(
            bench,
            spec(hardware={"memory_gib": 0.5 if entry == "escaping" else 1}),
            "job",
            trial,
            lambda _: None,
            lambda: False,
            None,
        )
        assert measurement is not None
        outcomes[entry], reasons[entry] = measurement.outcome, measurement.reason
        assert measurement.reason or measurement.outcome is Outcome.ok
    sandbox.close()
    assert outcomes == {
        "segfault": Outcome.crashed,
        "hang": Outcome.timed_out,
        "greedy": Outcome.infeasible,
        "silent": Outcome.crashed,
        "quick": Outcome.ok,
        "escaping": Outcome.infeasible,
        "illegal": Outcome.crashed,
        "panic": Outcome.crashed,
        "aborting": Outcome.infeasible,
        "without_pages": Outcome.infeasible,
        "without_threads": Outcome.infeasible,
        "cramped": Outcome.infeasible,
        "babbling": Outcome.crashed,
    }
    assert reasons["aborting"].endswith("memory allocation of 69648 bytes failed")
    assert reasons["panic"] == "PanicException: no entry found for key"
    assert "(result.measurement.configuration: Field required)" in reasons["babbling"]
    assert "illegal memory access" in reasons["illegal"] and "its cap is" in reasons["escaping"]
    assert "GiB (" in reasons["greedy"] and "bytes) needed to go on" in reasons["greedy"]


def test_a_killed_worker_leaves_no_process(tmp_path: Path) -> None:
    """SIGKILL of the process that owns the sandbox: the child and its own child go as well."""
    script = tmp_path / "owner.py"
    script.write_text(
        textwrap.dedent("""
        from tests.runner.test_sandbox import asked
        from worker.runner.sandbox import Sandbox

        if __name__ == "__main__":
            say = lambda message: print(message.text, flush=True)
            Sandbox(False, "tests.stubs:hang").run(asked(), 600, say, lambda: False)
        """)
    )
    owner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    children = psutil.Process(owner.pid).children(recursive=True)
    assert len(pids) == 2 and all(_alive(pid) for pid in pids) and children
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    gone = {psutil.Process(pid) for pid in pids if _alive(pid)} | {child for child in children if child.is_running()}
    _, left = psutil.wait_procs(gone, timeout=20)
    assert [process for process in left if _alive(process.pid)] == []
