"""Reads a job file and makes its local paths absolute, so that they mean the same to the control plane."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from service.contract.job import JobSpec
from service.contract.paths import UPLOAD, expanded, looks_local
from service.errors import InvalidJob
from service.jobtext import read
from service.validate import check


def read_job(path: Path) -> dict[str, Any]:
    """The job of a YAML or JSON file, or of a recommendation.json; `-` is standard input.

    InvalidJob or MalformedBody says what is wrong.
    """
    try:
        text = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise InvalidJob(f"{path} cannot be read: {error.strerror}") from error
    data = _spec_of_recommendation(text) or read(text, str(path))
    if not {"model", "dataset"} & data.keys():  # whatever it is, its lines are not printed
        raise InvalidJob(f"{path} is no job: it has neither model nor dataset.")
    job = check(data, JobSpec)
    spec = job.model_dump(mode="json", exclude_defaults=True)
    for part in ("model", "dataset"):
        source = spec[part]["source"]
        if not source.startswith(UPLOAD) and (looks_local(source) or _is_there(part, source)):
            spec[part]["source"] = str(expanded(source).absolute())
    if job.dataset.template_file:
        spec["dataset"]["chat_template"] = str(expanded(job.dataset.template_file).absolute())
    return spec


def with_template(spec: dict[str, Any]) -> dict[str, Any]:
    """The job with its chat template's text in place of the path of a file, which another machine does not have."""
    file = JobSpec.model_validate(spec).dataset.template_file
    if file is None:
        return spec
    try:
        text = Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidJob(f"dataset.chat_template: {file} cannot be read: {error}") from error
    return spec | {"dataset": spec["dataset"] | {"chat_template": text}}


def _spec_of_recommendation(text: bytes) -> dict[str, Any] | None:
    """The job that led to a recommendation.json, which has more values than any job; None where the text is none."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    spec = data.get("spec") if isinstance(data, dict) and "schema_version" in data else None
    return spec if isinstance(spec, dict) else None


def _is_there(part: str, source: str) -> bool:
    try:
        return Path(source).exists()
    except OSError as error:
        raise InvalidJob(f"{part}.source: {source:.80} cannot be read ({error.strerror}).") from error
