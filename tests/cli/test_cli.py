"""The command line: exit codes, JSON output, and one sentence for each mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from service.cli.jobfile import read_job
from service.client import Client, Refused
from tests import commands, processes, tiny
from tests.conftest import ROOT

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs `dynotune` with arguments."""
    return partial(commands.run, tmp_path, "service.cli")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The URL of a control plane without a worker."""
    with processes.served(tmp_path, tmp_path) as url:
        yield url


def test_nobody_there_is_3(run: Run) -> None:
    done = run("ls", "--url", "http://127.0.0.1:9")
    assert done.returncode == 3 and "no control plane answers" in done.stderr and "Traceback" not in done.stderr


def test_wrong_usage_is_2(run: Run, tmp_path: Path) -> None:
    assert run("fly").returncode == 2
    (tmp_path / "bad.yaml").write_text("model: {source: m}\ndataset: {source: d}\nsearch: {minutes: -3}\n")
    done = run("submit", "bad.yaml")
    assert done.returncode == 2 and "search.minutes" in done.stderr and "Traceback" not in done.stderr
    (tmp_path / "other.yaml").write_text("password: hunter2\nuser: me\n")
    done = run("submit", "other.yaml")
    assert done.returncode == 2 and "other.yaml is no job" in done.stderr and "password" not in done.stderr
    assert run("serve", "--port", "99999").returncode == 2
    (tmp_path / "broken.yaml").write_text("model: [")
    for name in ("broken.yaml", "missing.yaml"):
        done = run("tune", name)
        assert done.returncode == 2 and name in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("ls", "-n", "9223372036854775808"), "--limit"),
        (("submit", "job.json", "--idempotency-key", "é"), "An idempotency key has 1 to 200 characters of ASCII"),
        (("submit", "job.json", "--idempotency-key", "a\nb"), "An idempotency key has 1 to 200 characters of ASCII"),
        (("show", ".."), "There is no job '..'."),
        (("show", "JOB/trials"), "There is no job 'JOB/trials'."),
        (("trials", "job", "--follow"), "--follow goes with --log"),
        (("export", "job", "-o", "x.json"), "--output goes with --format"),
        (("show", "\udcff"), "what was given is no text in UTF-8"),
        (("ls", "--label", "\udcff=1"), "what was given is no text in UTF-8"),
        (("clone", "job", "--changes", '{"name": "\udcff"}'), "what was given is no text in UTF-8"),
    ],
)
def test_what_cannot_be_meant_is_said_before_anybody_is_asked(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "job.json").write_text(json.dumps(tiny.job(tmp_path)))
    done = run(*arguments, "--url", "http://127.0.0.1:9")
    assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr


def test_a_terminal_without_a_name_s_letters_shows_the_rest(run: Run, served: str, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(tiny.job(tmp_path, name="née 名")))
    assert run("submit", "job.json", "--url", served).returncode == 0
    command = [sys.executable, "-m", "service.cli", "ls", "--url", served]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "n?e" in done.stdout, done.stderr


def test_a_database_that_cannot_be_written_is_told_in_a_sentence(run: Run, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "dynotune.db").write_text("this is no database" * 1000)
    done = run("keys", "create", "bob")
    assert done.returncode == 3 and "The database is damaged" in done.stderr and "Traceback" not in done.stderr
    done = run("keys", "create", "bob", DYNOTUNE_DATABASE_URL="sqlite://")
    assert done.returncode == 2 and "a database in memory would be another one in every process" in done.stderr


def test_levers_need_no_control_plane(run: Run) -> None:
    done = run("levers", "--json", "--url", "http://127.0.0.1:9")
    assert done.returncode == 0
    assert "batching" in [lever["name"] for lever in json.loads(done.stdout)["levers"]]


def test_doctor(run: Run) -> None:
    done = run("doctor", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["free_disk_bytes"] > 0
    assert "cpu" in {one["device"] for one in found["devices"]}
    assert "torch" in found["devices"][0]["versions"]


def test_a_jobs_life_from_the_command_line(run: Run, served: str, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(tiny.job(tmp_path, labels={"team": "a"})))
    job = json.loads(run("submit", "job.json", "--json", "--url", served).stdout)["id"]
    listed = json.loads(run("ls", "--json", "--label", "team=a", "--url", served).stdout)
    assert [one["id"] for one in listed] == [job]
    shown = run("show", job, "--url", served)
    assert shown.returncode == 0 and "No worker is connected" in shown.stdout
    assert json.loads(run("trials", job, "--json", "--url", served).stdout) == []
    assert [one["kind"] for one in json.loads(run("events", job, "--json", "--url", served).stdout)] == ["submitted"]
    early = run("export", job, "--url", served)
    assert early.returncode == 2 and "no successful trial yet" in early.stderr
    assert json.loads(run("cancel", job, "--json", "--url", served).stdout)["status"] == "cancelled"
    assert run("watch", job, "--url", served).returncode == 1
    unknown = run("show", "nothing", "--url", served)
    assert unknown.returncode == 2 and "There is no job 'nothing'" in unknown.stderr


def test_a_look_imports_no_server(served: str, tmp_path: Path) -> None:
    """Commands that only ask the control plane import neither its libraries nor the worker's, so they start at once."""
    (tmp_path / "job.json").write_text(json.dumps(tiny.job(tmp_path)))
    code = """
import sys
from service.cli import main
heavy = "fastapi uvicorn sqlalchemy alembic optuna libcst numpy torch service.exports service.levers".split()
try:
    main()
finally:
    sys.stderr.write(" ".join(name for name in heavy if name in sys.modules))
"""

    def run(*arguments: str) -> str:
        command = [sys.executable, "-c", code, *arguments]
        around = os.environ | {"PYTHONPATH": str(ROOT), "DYNOTUNE_URL": served}
        done = subprocess.run(command, cwd=tmp_path, env=around, capture_output=True, text=True, timeout=60)
        assert done.stderr == "" and done.stdout, (arguments, done.stdout, done.stderr)
        return done.stdout

    with Client(served) as client:
        job = client.submit(read_job(tmp_path / "job.json"))
    for arguments in (["--help"], ["ls"], ["show", job], ["trials", job], ["cancel", job], ["watch", job]):
        run(*arguments)


def test_the_client_tells_refusals_apart(served: str) -> None:
    body: dict[str, Any] = {"model": {"source": "./no"}, "dataset": {"source": "./no.jsonl"}}
    with Client(served) as client, pytest.raises(Refused) as refused:
        client.submit(body)
    assert refused.value.code == "invalid-job" and len(refused.value.problem.errors or ()) == 2
