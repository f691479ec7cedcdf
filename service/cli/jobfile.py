"""Reads a job file and makes its local paths absolute, so that they mean the same to the control plane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from service.contract.job import JobSpec
from service.contract.paths import UPLOAD, expanded, looks_local
from service.errors import InvalidJob
from service.jobtext import read
from service.validate import check


def read_job(path: Path) -> dict[str, Any]:
    """The job of a YAML or JSON file, or of a recommendation.json; InvalidJob or MalformedBody says what is wrong."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InvalidJob(f"{path} cannot be read: {error.strerror}") from error
    data = read(text, str(path))
    if "schema_version" in data and isinstance(data.get("spec"), dict):
        data = data["spec"]  # a recommendation.json holds the job that led to it
    if not {"model", "dataset"} & data.keys():  # whatever it is, its lines are not printed
        raise InvalidJob(f"{path} is no job: it has neither model nor dataset.")
    spec = check(data, JobSpec).model_dump(mode="json", exclude_defaults=True)
    for part in ("model", "dataset"):
        source = spec[part]["source"]
        if not source.startswith(UPLOAD) and (looks_local(source) or _is_there(part, source)):
            spec[part]["source"] = str(expanded(source).absolute())
    return spec


def _is_there(part: str, source: str) -> bool:
    try:
        return Path(source).exists()
    except OSError as error:
        raise InvalidJob(f"{part}.source: {source:.80} cannot be read ({error.strerror}).") from error
