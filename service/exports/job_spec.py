"""The job that led to a recommendation, as JSON, to run it again."""

from __future__ import annotations

import json

from service.contract.recommendation import Recommendation
from service.exports.base import Export


def write(recommendation: Recommendation) -> str:
    """The job as it was submitted, defaults filled in."""
    return json.dumps(recommendation.spec, indent=2) + "\n"


EXPORT = Export("spec", "the job that led to it, to run it again", write)
