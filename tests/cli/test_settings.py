"""Settings: what the variables mean, and that a wrong one is answered with one sentence by every command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from service.cli.doctor import named
from service.cli.estimate_command import gibibytes
from service.cli.tune import private
from service.contract.hardware import HardwareFacts
from service.db import _identity, connect, upgrade
from service.errors import Misconfigured
from service.settings import Settings
from tests import commands, tiny
from tests.conftest import ROOT

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a module as `python -m` does, in the test's folder."""
    return partial(commands.run, tmp_path)


def one_sentence(done: subprocess.CompletedProcess[str], code: int, words: str) -> None:
    assert done.returncode == code and words in done.stderr, done.stderr
    assert done.stderr.startswith("dynotune") and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("DYNOTUNE_DATABASE_URL", "postgres://here/x", "postgresql+psycopg://"),
        ("DYNOTUNE_DATABASE_URL", "postgresql+psycopg://here:port/x", "DYNOTUNE_DATABASE_URL"),
        ("DYNOTUNE_DATABASE_URL", "mysql://here/x", "dynotune has no mysql"),
        ("DYNOTUNE_MIN_FREE_DISK_GIB", "abc", "must be a number of GiB, not 'abc'"),
        ("DYNOTUNE_MIN_FREE_DISK_GIB", "inf", "must be a number of GiB, not 'inf'"),
        ("DYNOTUNE_ALLOW_PICKLE", "perhaps", "DYNOTUNE_ALLOW_PICKLE must be yes or no, not 'perhaps'"),
        ("DYNOTUNE_HOME", "/dev/null/home", "DYNOTUNE_HOME: /dev/null/home cannot be written"),
    ],
)
def test_a_wrong_variable(run: Run, name: str, value: str, words: str) -> None:
    one_sentence(run("service.cli", "serve", "--no-worker", **{name: value}), 2, words)


def test_allowed_hosts_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNOTUNE_ALLOWED_HOSTS", "service, tune.example,")
    assert Settings.from_environment().allowed_hosts == ("service", "tune.example")


def test_what_variables_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty variable counts as unset, except for the folders that may be read: there, empty allows none."""
    monkeypatch.chdir(tmp_path)
    for name in ("DATABASE_URL", "ALLOW_PICKLE", "MIN_FREE_DISK_GIB", "LOCKS"):
        monkeypatch.setenv(f"DYNOTUNE_{name}", "")
    settings = Settings.from_environment()
    assert settings.database_url == f"sqlite:///{tmp_path}/home/dynotune.db" and settings.data_roots == (tmp_path,)
    assert (settings.allow_pickle, settings.min_free_disk_bytes, settings.lock_folder.name) == (
        False,
        1 << 30,
        "dynotune-locks",
    )
    for text, roots in (("", ()), ("a::/b", (tmp_path / "a", Path("/b")))):
        monkeypatch.setenv("DYNOTUNE_DATA_ROOTS", text)
        assert Settings.from_environment().data_roots == roots
    monkeypatch.setenv("DYNOTUNE_MIN_FREE_DISK_GIB", "0.5")
    monkeypatch.setenv("DYNOTUNE_ALLOW_PICKLE", "yes")
    monkeypatch.setenv("DYNOTUNE_LOCKS", "/locks")
    changed = Settings.from_environment()
    assert (changed.min_free_disk_bytes, changed.allow_pickle, changed.lock_folder) == (1 << 29, True, Path("/locks"))


@pytest.mark.parametrize("name", ["a?b", "p%20q", "100%", "an umlaut \u00fc"])
def test_a_home_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("DYNOTUNE_HOME", str(tmp_path / name))
    settings = Settings.from_environment()
    job = {"model": {"source": "org/model"}, "dataset": {"source": "org/data"}}
    with private(settings, job) as own:
        for one in (settings, own):
            upgrade(one.database_url)
            engine = connect(one.database_url)
            assert _identity(engine) is not None
            engine.dispose()
        assert [file.name for file in tmp_path.iterdir()] == [name]
        assert sorted(file.name[:5] for file in (tmp_path / name).iterdir()) == ["dynot", "tune-"]
        assert [file.name for file in (tmp_path / name).glob("tune-*/*")] == ["tune.db"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql+psycopg://me:secret@here:5433/x?password=secret", "postgresql://here:5433/x"),
        ("postgresql+psycopg:///x?host=here&password=se@cret", "postgresql:///x"),
        ("sqlite:////home/me/dynotune.db", "sqlite:////home/me/dynotune.db"),
        ("secret", "no URL of a database"),
        ("postgresql+psycopg://me:secret@here:secret/x", "no URL of a database"),
    ],
)
def test_what_opens_the_database_is_not_shown(url: str, shown: str) -> None:
    assert named(url) == shown


@pytest.mark.parametrize(("text", "gib"), [("24GiB", 24), ("24", 24), ("1.5 gib", 1.5), ("512MiB", 0.5)])
def test_a_size(text: str, gib: float) -> None:
    assert gibibytes(text) == gib and gibibytes("80GB") == 80 * 10**9 / 2**30


@pytest.mark.parametrize("text", ["", "0", "-3GB", "much", "nanGiB", "5 parsec"])
def test_no_size(text: str) -> None:
    with pytest.raises(Misconfigured, match="--memory: .* is no size"):
        gibibytes(text)


def test_no_such_server(run: Run) -> None:
    one_sentence(run("service.cli", "ls", DYNOTUNE_URL="http://localhost:port"), 3, "is not a URL")
    one_sentence(run("service.cli", "ls", DYNOTUNE_URL="localhost:8000"), 3, "it has to begin with http://")


def test_no_such_recommendation(run: Run, tmp_path: Path) -> None:
    one_sentence(run("service.cli", "export", "nofile.json"), 2, "nofile.json does not exist; give a job's id or")
    (tmp_path / "job.json").write_text('{"name": "a job"}')
    other = run("service.cli", "export", str(tmp_path / "job.json"))
    one_sentence(other, 2, "is no recommendation.json (")
    assert "-f json -o recommendation.json` writes one" in other.stderr
    (tmp_path / "job.json").write_text("{")
    one_sentence(run("service.cli", "export", str(tmp_path / "job.json")), 2, "is no recommendation.json (")


@pytest.fixture
def stranger() -> Iterator[str]:
    """A web server that is no control plane and answers 200 to everything."""

    class Yes(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Yes) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_port_on_which_somebody_listens(run: Run, stranger: str) -> None:
    port = stranger.rpartition(":")[2]
    done = run("service.cli", "serve", "--no-worker", "--port", port)
    one_sentence(done, 2, f"Port {port} of 127.0.0.1 cannot be listened on: Address already in use")


def test_an_empty_id(run: Run, stranger: str) -> None:
    one_sentence(run("service.cli", "show", "", DYNOTUNE_URL=stranger), 2, "There is no job ''.")


def test_somebody_elses_server(run: Run, stranger: str) -> None:
    one_sentence(run("service.cli", "ls", DYNOTUNE_URL=stranger), 3, "is not a dynotune control plane")


@pytest.mark.parametrize("output", ["job.json", "job.json/below"])
def test_an_output_that_cannot_be_written_is_told_before_measuring(run: Run, tmp_path: Path, output: str) -> None:
    (tmp_path / "job.json").write_text(json.dumps(tiny.job(tmp_path)))
    one_sentence(run("service.cli", "tune", "job.json", "-o", output), 2, f"--output: {output} cannot be written")


def test_a_worker_without_tables(run: Run, tmp_path: Path, facts: Callable[..., HardwareFacts]) -> None:
    (tmp_path / "facts.json").write_text(facts().model_dump_json())
    one_sentence(run("worker", "--facts", "facts.json"), 3, "`dynotune serve` brings them up to date")
    nowhere = "postgresql+psycopg://postgres@/x?host=/nowhere"
    done = run("worker", "--facts", "facts.json", DYNOTUNE_DATABASE_URL=nowhere)
    one_sentence(done, 3, "The database does not answer")
    one_sentence(run("worker", "--facts", "nowhere.json"), 2, "--facts: nowhere.json")
    one_sentence(run("worker", "--server", "foo"), 2, "--server: 'foo' is no control plane's URL")


def test_ctrl_c_while_the_worker_still_looks_at_its_devices(tmp_path: Path) -> None:
    """The facts come from a pipe that nobody writes to, so that the worker is surely still starting."""
    os.mkfifo(tmp_path / "facts.json")
    command = [sys.executable, "-m", "worker", "--facts", "facts.json"]
    around = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=around, stderr=subprocess.PIPE, text=True)
    with (tmp_path / "facts.json").open("w"):  # opens once the worker reads
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said == ""
