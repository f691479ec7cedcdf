"""Migrations: the models and the migrated schema are the same, on both databases; all or nothing, one at a time."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import JSON, Engine, MetaData, inspect, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from service import jobs
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.task import PlanClaim, PlanDecision, TaskKind
from service.db import alembic_config, check, connect, upgrade
from service.errors import Unavailable
from service.models import Base
from service.queue import Queue
from tests.conftest import ROOT

TABLES = {
    "api_keys",
    "dynotune_alembic_version",
    "events",
    "job_labels",
    "jobs",
    "needs",
    "submissions",
    "tasks",
    "workers",
    "webhooks",
    "deliveries",
}


def test_the_schema_is_the_models(engine: Engine, database_url: str) -> None:
    upgrade(database_url)  # again
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": "dynotune_alembic_version"})
        assert compare_metadata(context, Base.metadata) == []
    assert set(inspect(engine).get_table_names()) == TABLES


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """A database without a schema."""
    url = f"sqlite:///{tmp_path / 'empty.db'}"
    server = request.getfixturevalue("postgres_server") if request.param == "postgresql" else None
    if server:
        server.create_database("empty")
        url = server.url("empty")
    engine = connect(url)
    yield engine
    engine.dispose()
    if server:
        server.drop_database("empty")


def url_of(engine: Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


def test_a_migration_that_fails_half_way_changes_nothing(empty: Engine) -> None:
    with empty.begin() as connection:
        connection.execute(text("CREATE TABLE workers (id INTEGER)"))  # in the way of the last table
    with pytest.raises(Unavailable, match="workers"):
        upgrade(url_of(empty))
    assert set(inspect(empty).get_table_names()) == {"workers"}


OLD_TASK = (
    "INSERT INTO tasks (id, job_id, kind, state, rank, job_seq, number, payload, attempt, deaths, base_version, "
    "created_at) VALUES (:id, :job, :kind, 'queued', 0, 1, 0, '{}', 0, 0, 0, 1.0)"
)
OLD_JOB = (
    "INSERT INTO jobs (id, name, spec, status, phase, history_version, created_at) "
    "VALUES ('j', 'n', '{}', 'running', 'searching', 0, 1.0)"
)


def test_estimates_become_tasks_and_the_tasks_of_jobs_stay(empty: Engine) -> None:
    config = alembic_config(url_of(empty))
    command.upgrade(config, "0002")
    with empty.begin() as connection:
        connection.execute(text(OLD_JOB))
        connection.execute(text(OLD_TASK), {"id": "t", "job": "j", "kind": "plan"})
    command.upgrade(config, "0003")
    with empty.begin() as connection:
        assert connection.execute(text("SELECT id, job_id, error FROM tasks")).all() == [("t", "j", None)]
        connection.execute(text(OLD_TASK), {"id": "e", "job": None, "kind": "estimate"})
    with pytest.raises(IntegrityError), empty.begin() as connection:  # one open plan a job, still
        connection.execute(text(OLD_TASK), {"id": "u", "job": "j", "kind": "plan"})
    command.downgrade(config, "0002")
    with empty.begin() as connection:
        assert connection.execute(text("SELECT id FROM tasks")).all() == [("t",)]
    command.upgrade(config, "head")


def test_tasks_that_wait_keep_what_they_need(empty: Engine, facts: Callable[..., HardwareFacts]) -> None:
    """Up, a claim by the new tables serves them in order; down again, the old columns are as they were."""
    url = url_of(empty)
    config = alembic_config(url)
    command.upgrade(config, "0003")
    needs = [("cuda", "h200", None, None), (None, None, None, None), ("cpu", None, 2.5, "f" * 16)]
    with empty.begin() as connection:
        for number, values in enumerate(needs):
            for again in range(2):
                task = {"id": f"e{number}{again}", "job": None, "kind": "estimate"}
                connection.execute(text(OLD_TASK), task)
                named = dict(zip(("device", "name", "bytes", "fingerprint"), values, strict=True))
                update = "need_device = :device, need_name = :name, need_bytes = :bytes, fingerprint = :fingerprint"
                payload = json.dumps({"spec": {"model": {"source": "m"}, "dataset": {"source": "d"}}, "memory_gib": 1})
                connection.execute(
                    text(f"UPDATE tasks SET {update}, payload = :payload WHERE id = :id"),  # noqa: S608
                    named | {"id": task["id"], "payload": payload},
                )
    command.upgrade(config, "head")
    with empty.begin() as connection:
        rows = connection.execute(
            text(
                "SELECT tasks.id, device, name, bytes, fingerprint FROM tasks JOIN needs ON needs.key = need "
                "ORDER BY tasks.seq"
            )
        ).all()
        assert rows == [(f"e{number}{again}", *values) for number, values in enumerate(needs) for again in range(2)]
        assert connection.execute(text("SELECT count(*) FROM needs")).scalar() == len(needs)
    queue = Queue(connect(url))
    queue.register("w", 1, facts())
    claims = [queue.claim("w", (TaskKind.estimate,)) for _ in range(3)]
    assert [one and one.task_id for one in claims] == ["e10", "e11", None]
    queue.engine.dispose()
    command.downgrade(config, "0003")
    with empty.begin() as connection:
        kept = text("SELECT need_device, need_name, need_bytes, fingerprint FROM tasks ORDER BY seq")
        assert connection.execute(kept).all() == [values for values in needs for _ in range(2)]
    command.upgrade(config, "head")


FILLED = {
    "id": "0123456789abcdef",
    "job_id": "0123456789abcdef",
    "name": "old",
    "status": "queued",
    "phase": "queued",
    "state": "queued",
    "kind": "plan",
    "key": "team",
    "value": "nlp",
    "fingerprint": "f" * 16,
    "device": "cpu",
    "need": "team",
    "spec": JobSpec.model_validate(
        {"name": "old", "labels": {"team": "nlp"}, "model": {"source": "m"}, "dataset": {"source": "d"}}
    ).model_dump(mode="json", exclude={"priority"}),
}
OURS = ("jobs", "job_labels", "needs", "tasks", "events", "workers", "estimates", "api_keys", "submissions")


def fill(engine: Engine) -> None:
    """A row in each table of ours, as that revision has them: what must be there, and what FILLED names."""
    found = MetaData()
    found.reflect(engine)
    with engine.begin() as connection:
        for table in (found.tables[name] for name in OURS if name in found.tables):
            values: dict[str, object] = {}
            for column in table.columns:
                if (
                    column.name in FILLED
                    and not (table.name == "tasks" and column.name in ("key", "fingerprint"))
                    and not (table.name == "needs" and column.nullable)
                ):
                    values[column.name] = FILLED[column.name]
                elif not column.nullable and column.name != "seq":
                    kind = column.type.python_type
                    values[column.name] = "x" if kind is str else {} if isinstance(column.type, JSON) else kind()
            if table.name == "workers":
                values |= {"facts": {}, "state": "idle"}
            if table.name == "jobs" and "fingerprint" in values:
                del values["fingerprint"]
            connection.execute(table.insert().values(values))


@pytest.mark.parametrize("revision", ["0001", "0002", "0003", "0004", "0005"])
def test_a_database_of_every_earlier_revision_goes_on(
    empty: Engine, revision: str, facts: Callable[..., HardwareFacts]
) -> None:
    """With rows in it, it comes up to date, and its waiting job is listed, claimed and ended."""
    url = url_of(empty)
    command.upgrade(alembic_config(url), revision)
    fill(empty)
    upgrade(url)
    queue = Queue(connect(url))
    queue.register("w", 1, facts())
    with Session(queue.engine) as session:
        (listed,) = jobs.page(session, jobs.Wanted(label=("team", "nlp")), None, 10, 1.0).items
    assert (listed.id, listed.name, listed.priority, listed.owner) == (FILLED["id"], "old", 0, None)
    claim = queue.claim("w", (TaskKind.plan,))
    assert isinstance(claim, PlanClaim) and claim.job_id == FILLED["id"] and claim.spec.name == "old"
    queue.finish_plan(claim, PlanDecision(finish=True, error="it ends"))
    with Session(queue.engine) as session:
        assert jobs.get(session, claim.job_id).status == "failed"
    queue.delete(claim.job_id)
    queue.engine.dispose()


def test_services_that_start_at_once(empty: Engine) -> None:
    command = [sys.executable, "-c", "import sys; from service.db import upgrade; upgrade(sys.argv[1])", url_of(empty)]
    starters = [subprocess.Popen(command, cwd=ROOT) for _ in range(4)]
    assert [starter.wait(60) for starter in starters] == [0] * 4
    assert set(inspect(empty).get_table_names()) == TABLES


def test_a_new_file_is_waited_for_while_another_writes_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite itself does not wait before a file's journal is changed: one of the services that start at once fell."""
    file = tmp_path / "new.db"
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    met: list[float] = []

    def pause(seconds: float) -> None:
        met.append(seconds)
        other.execute("COMMIT")

    monkeypatch.setattr("service.db.time.sleep", pause)
    engine = connect(f"sqlite:///{file}")
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 30_000
    assert len(met) == 1
    engine.dispose()
    other.close()


def test_a_database_without_a_schema_is_told(empty: Engine) -> None:
    with pytest.raises(Unavailable, match="no tables yet"):
        check(empty)
    upgrade(url_of(empty))
    check(empty)
    with empty.begin() as connection:
        connection.execute(text("UPDATE dynotune_alembic_version SET version_num = 'future'"))
    with pytest.raises(Unavailable, match="not one of this version"):
        upgrade(url_of(empty))


@pytest.mark.parametrize("url", ["sqlite:///{}", "sqlite+pysqlite:///{}", "sqlite:///file:{}?uri=true"])
def test_a_new_database_is_its_owner_s_alone(tmp_path: Path, url: str) -> None:
    """It has the jobs of all users, and its folder may be open to others. One that is there keeps its mode."""
    file = tmp_path / "new.db"
    upgrade(url.format(file))
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    upgrade(url.format(file))
    assert file.stat().st_mode & 0o777 == 0o640
