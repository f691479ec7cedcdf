"""An API on each database, with a folder of models and data that may be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.api import create_app
from service.settings import Settings

LLAMA = {"model_type": "llama", "max_position_embeddings": 1024}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The one allowed folder: a model with weights drawn, good and bad datasets."""
    root = tmp_path / "root"
    (root / "model").mkdir(parents=True)
    (root / "model" / "config.json").write_text(json.dumps(LLAMA))
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    (root / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (root / "labels.csv").write_text("text,label\ngood,1\nbad,negative\n")
    (root / "empty.jsonl").write_text("")
    (root / "broken.jsonl").write_text('{"prompt": "a"}\nnot json\n')
    return root


@pytest.fixture
def settings(root: Path, tmp_path: Path, database_url: str) -> Settings:
    """Settings that allow `root` only."""
    return Settings(home=tmp_path, database_url=database_url, data_roots=(root,), hub_cache=tmp_path / "hub")


@pytest.fixture
def api(settings: Settings) -> Iterator[TestClient]:
    """The API."""
    with here(settings) as client:
        yield client


def here(settings: Settings, raises: bool = True) -> TestClient:
    """A client of an API, which asks it by the address that it listens on; `raises` raises its failures here."""
    return TestClient(create_app(settings), base_url="http://127.0.0.1:8000", raise_server_exceptions=raises)


@pytest.fixture
def job() -> Callable[..., dict[str, Any]]:
    """A valid body; `changes` replace whole sections."""

    def make(**changes: Any) -> dict[str, Any]:
        body: dict[str, Any] = {
            "name": "test",
            "model": {"source": "model", "weights": "random"},
            "dataset": {"source": "data.jsonl", "max_length": 512},
            "training": {"effective_batch_size": 32},
        }
        return body | changes

    return make
