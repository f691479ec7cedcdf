"""A worker dies after a claim, in the middle of a trial, before and after a commit, in its heartbeat, in its plan.

One job a point here, and 20 of them on both databases under `make chaos`. No result is lost, and none counts twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from service.models import Event, Job, Task
from tests import commands
from tests.failpoints import POINTS, TRIALS
from tests.processes import none_left

LONG = os.environ.get("DYNOTUNE_CHAOS") == "1"
SEEDS = range(20) if LONG else range(1)
DATABASES = ("sqlite", "postgresql")
CASES = [
    (database, point)
    for number, point in enumerate(POINTS)
    for which, database in enumerate(DATABASES)
    if LONG or number % 2 == which
]


@pytest.mark.timeout(1800 if LONG else 180)
@pytest.mark.parametrize(("database_url", "point"), CASES, indirect=["database_url"])
def test_a_death_at_this_point_loses_nothing(
    engine: Engine, database_url: str, tmp_path: Path, facts: Callable[..., Any], point: str
) -> None:
    (tmp_path / "locks").mkdir()
    (tmp_path / "facts.json").write_text(facts(bf16_native=True).model_dump_json())
    arguments = [database_url, "facts.json", point, *map(str, SEEDS)]
    said, errors = tmp_path / "printed.txt", tmp_path / "errors.txt"
    around = {"DYNOTUNE_DATABASE_URL": database_url}
    process = commands.start(tmp_path, said, errors, "tests.failpoints:program", *arguments, environment=around)
    assert process.wait(1700 if LONG else 170) == 0, errors.read_text()[-4000:]
    assert int(said.read_text()) >= len(SEEDS), "the point was never reached"
    none_left(tmp_path)
    with Session(engine) as session:
        jobs = session.scalars(select(Job)).all()
        assert [(job.status, job.error) for job in jobs] == [("succeeded", None)] * len(SEEDS)
        for job in jobs:
            tasks = session.scalars(select(Task).where(Task.job_id == job.id, Task.kind == "trial")).all()
            told = session.scalars(select(Event.data).where(Event.job_id == job.id, Event.kind == "trial")).all()
            assert {task.outcome for task in tasks} == {"ok"} and len({task.key for task in tasks}) == len(tasks)
            assert len(tasks) == TRIALS and len(told) == len({one["task"] for one in told}) == TRIALS
