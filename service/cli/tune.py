"""`dynotune tune`: one job from file to recommendation, on an embedded control plane and one local worker."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from service.cli import display, exporting
from service.cli.embedded import LocalWorker, control_plane
from service.cli.jobfile import read_job
from service.cli.output import console as new_console
from service.cli.output import say
from service.cli.result import show_result
from service.client import Client, Refused, Unreachable
from service.contract.recommendation import Recommendation
from service.contract.states import JobStatus
from service.contract.views import JobView, TrialList
from service.errors import Misconfigured
from service.exports import EXPORTS
from service.settings import Settings, sqlite_url

POLL_SECONDS = 1.0
# Seconds for an answer of the run's own control plane. On a machine that others use it may be slow, and without its
# answer all that was measured would be lost.
ANSWER_SECONDS = 600.0
INTERRUPTED = 130  # exit code
FILES = {"json": "recommendation.json", "train.py": "train.py"}  # export -> file
TRIALS = "trials.json"  # all that was tried, as the API lists it: the run's own database is gone when it ends


@dataclass(frozen=True)
class Run:
    """How a job's run here ended, and its best if it has one, with the files that hold it (name -> text)."""

    ended: JobView
    interrupted: bool
    best: Recommendation | None
    files: dict[str, str]

    @property
    def code(self) -> int:
        """The exit code: 0 done, 1 failed, 130 interrupted."""
        if self.interrupted:
            return INTERRUPTED
        return 0 if self.best and self.ended.status is JobStatus.succeeded else 1


def tune(path: Path, output: Path, as_json: bool, console: Console) -> int:
    """Run the job of a file; its exit code. Writes recommendation.json, train.py and trials.json into `output`.

    An interrupted run writes the best so far; a second interrupt ends it at once. Where nothing ran to its end, the
    trials are written alone, with the reasons.
    """
    job = read_job(path)
    _prepare(output)
    done = run(job, new_console(quiet=True) if as_json else console)
    for name, text in done.files.items():
        (output / name).write_text(text)
    if done.best and as_json:
        print(done.best.model_dump_json(indent=2))
    elif done.best:
        _conclude(console, done.best, output, [output / name for name in done.files])
    elif done.files:
        say(f"its trials: {output / TRIALS}")
    return done.code


def run(job: dict[str, Any], console: Console) -> Run:
    """Run a job on a control plane and a worker of its own, and show its progress."""
    settings = Settings.from_environment()
    with (
        _interruptible(),
        private(settings, job) as own,
        control_plane(own) as url,
        Client(url, ANSWER_SECONDS) as client,
    ):
        job_id = client.submit(job)
        worker = LocalWorker(own)
        interrupted = False
        try:
            ended = _follow(client, worker, job_id, console)
        except KeyboardInterrupt:
            interrupted, ended = True, _interrupted(client, job_id)
        finally:
            with contextlib.suppress(Refused, Unreachable):  # Refused means that the job has ended already
                client.cancel(job_id)
            worker.stop()
        if ended.error:
            say(ended.error)
        best = client.recommendation(job_id) if ended.best else None
        files = {file: EXPORTS[name].write(best) for name, file in FILES.items()} if best else {}
        if trials := client.trials(job_id):
            files[TRIALS] = TrialList(items=trials).model_dump_json(indent=2)
    return Run(ended, interrupted, best, files)


@contextlib.contextmanager
def private(settings: Settings, job: dict[str, Any]) -> Iterator[Settings]:
    """Settings with a database for this run only, so that it never meets a worker or a job of another run."""
    # What the job file names may be read, since this control plane serves only the user who named it.
    paths = (job["model"]["source"], job["dataset"]["source"], job["dataset"].get("chat_template") or "")
    sources = [Path(one) for one in paths if one.startswith("/")]
    named = tuple(end.parent for source in sources for end in (source, Path(os.path.realpath(source))))
    if apart := next((str(one) for one in named if os.pathsep in str(one)), None):
        raise Misconfigured(f"{apart}: the name of a folder with a model or with data must not contain {os.pathsep!r}.")
    with tempfile.TemporaryDirectory(prefix="tune-", dir=settings.home) as folder:
        own = {"database_url": sqlite_url(Path(folder) / "tune.db"), "data_roots": (*settings.data_roots, *named)}
        yield settings.model_copy(update=own | {"require_keys": False, "admin_key": None})


def _follow(client: Client, worker: LocalWorker, job_id: str, console: Console) -> JobView:
    trials = display.Trials(lambda: client.trials(job_id))
    with display.Progress(console) as progress:

        def look(job: JobView) -> None:
            worker.check()
            if job.waiting_for and not any(one.alive for one in client.workers()):
                job = job.model_copy(update={"waiting_for": "the local worker starts"})
            elif job.waiting_for and (
                why := client.job(job_id).waiting_for
            ):  # asked again now that the worker is there
                raise SystemExit(f"dynotune: {why}")
            progress.show(job, trials.of(job))

        return client.wait(job_id, POLL_SECONDS, look)


def _interrupted(client: Client, job_id: str) -> JobView:
    """End the job, with the best so far if a trial has succeeded; the job as it ended."""
    with contextlib.suppress(Refused):  # the job has ended in this moment
        if client.job(job_id).best:
            say("interrupted: the job is stopped with its best so far; a second Ctrl-C ends at once")
            client.stop(job_id)
        else:
            say("interrupted: the job is cancelled")
            client.cancel(job_id)
    return client.job(job_id)


def _prepare(output: Path) -> None:
    """Make the folder of the results; Misconfigured now, not after an hour of measuring, where that is impossible."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            return
    except OSError as error:
        raise Misconfigured(f"--output: {output} cannot be written ({error.strerror}).") from error


def _conclude(console: Console, best: Recommendation, output: Path, written: list[Path]) -> None:
    show_result(console, best)
    console.print(f"written: {', '.join(map(str, written))}", soft_wrap=True)
    exporting.show_next(console, best, str(output / FILES["json"]))


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Have SIGTERM and a closed terminal interrupt the run as Ctrl-C does, so that the worker is ended too."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
