"""One pure function a trainer: recommendation -> text. A new export is a file and a line in EXPORTS."""

from __future__ import annotations

import json
from collections.abc import Callable

from service.contract.recommendation import Recommendation
from service.exports.train_py import train_py


def as_json(recommendation: Recommendation) -> str:
    """The recommendation itself."""
    return recommendation.model_dump_json(indent=2) + "\n"


def as_spec(recommendation: Recommendation) -> str:
    """The job that led to it, to run it again."""
    return json.dumps(recommendation.spec, indent=2) + "\n"


EXPORTS: dict[str, Callable[[Recommendation], str]] = {"json": as_json, "spec": as_spec, "train.py": train_py}
