"""docs/job.md is what a job may say."""

from __future__ import annotations

import runpy
from collections.abc import Iterator

import yaml
from pydantic import BaseModel

from service.contract.job import JobSpec
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "job.md"


def keys(model: type[BaseModel]) -> Iterator[str]:
    """The names of a model's fields, and in place of a section those within it."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation)
        else:
            yield name


def test_the_page_is_the_jobs() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_job.py"))["text"]()
    assert PAGE.read_text("utf-8") == made, "run: python docs/make_job.py"
    assert all(f"`{name}`" in made for name in keys(JobSpec))


def test_every_key_says_what_it_is() -> None:
    """A line of the table without a description would leave its key to be guessed."""
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `") and line.count(" | ") == 3]
    assert len(rows) > 40 and not [row for row in rows if not row.split(" | ")[3].strip(" |")]


def test_the_page_s_job_is_one() -> None:
    example = PAGE.read_text("utf-8").split("```yaml\n")[1].split("```")[0]
    assert JobSpec.model_validate(yaml.safe_load(example)).baseline == {"per_device_train_batch_size": 4, "bf16": True}
