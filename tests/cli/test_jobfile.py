"""Job files as the command line reads them: paths that mean the same elsewhere, and recommendations as jobs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from service.cli.jobfile import read_job, with_template
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.errors import InvalidJob, MalformedBody
from service.jobtext import read
from service.recommend import recommend
from tests.factory import configuration, history, measured, record


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the user is, with a job's files."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("model", ""), ("rows.jsonl", "{}"), ("t.jinja", "{{ messages }}")):
        (tmp_path / name).write_text(text)
    job = {"model": {"source": "./model"}, "dataset": {"source": "rows.jsonl", "chat_template": "t.jinja"}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    return tmp_path


def test_paths_are_those_of_the_users_folder(here: Path) -> None:
    spec = read_job(Path("job.json"))
    assert spec["model"]["source"] == f"{here}/model"
    assert spec["dataset"] == {"source": f"{here}/rows.jsonl", "chat_template": f"{here}/t.jinja"}


def test_a_job_may_come_from_standard_input(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (here / "job.json").open() as piped:
        monkeypatch.setattr("sys.stdin", piped)
        assert read_job(Path("-")) == read_job(Path("job.json"))


def test_a_template_that_is_sent_along_is_its_text(here: Path) -> None:
    assert with_template(read_job(Path("job.json")))["dataset"]["chat_template"] == "{{ messages }}"
    (here / "t.jinja").unlink()
    with pytest.raises(InvalidJob, match=r"dataset.chat_template: .*/t.jinja cannot be read: .*No such file"):
        with_template(read_job(Path("job.json")))
    job = {"model": {"source": "org/model"}, "dataset": {"source": "org/data", "chat_template": "chatml"}}
    assert with_template(job) == job


def test_a_recommendation_is_the_job_that_led_to_it(
    tmp_path: Path, spec: Callable[..., JobSpec], facts: Callable[..., HardwareFacts]
) -> None:
    """`dynotune tune recommendation.json` is how a recommendation says that it can be made again."""
    job = spec(search={"trials": 7})
    more = (record(measured(configuration(optimizer=name, compile="whole"))) for name in ("adafactor", "adamw-8bit"))
    found = recommend("j", job, facts(), (*history(job, 5.0, 4.0, 3.0), *more), {})
    assert found is not None and found.reproduce == "dynotune tune recommendation.json"
    file = tmp_path / "recommendation.json"
    file.write_text(found.model_dump_json(indent=2))
    with pytest.raises(MalformedBody, match="more than 2,000 values"):
        read(file.read_bytes(), str(file))
    assert JobSpec.model_validate(read_job(file)) == job
    file.write_text(json.dumps({"schema_version": "1", "spec": 3}))
    with pytest.raises(InvalidJob, match="is no job: it has neither model nor dataset"):
        read_job(file)
