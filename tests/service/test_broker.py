"""The port that workers use: a database that is away is the port's error, on both databases."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from service.broker import connect
from service.contract.task import TaskKind
from service.errors import BrokerUnavailable


def test_a_database_that_is_away_is_the_port_s_error(
    request: pytest.FixtureRequest, database_url: str, tmp_path: Path, facts: Any
) -> None:
    broker: Any = connect(database_url)
    broker.register("w", 1, facts())
    broker.register("w", 1, facts())  # twice is no mistake
    assert broker.claim("w", tuple(TaskKind)) is None
    if database_url.startswith("sqlite"):
        for file in tmp_path.glob("test.db*"):
            file.unlink()
        (tmp_path / "test.db").mkdir()
    else:
        server = request.getfixturevalue("postgres_server")
        server.drop_database(os.path.basename(database_url.partition("?")[0]))
    for call in (broker.reap, lambda: broker.claim("w", tuple(TaskKind))):
        with pytest.raises(BrokerUnavailable):
            call()
    broker.engine.dispose()
