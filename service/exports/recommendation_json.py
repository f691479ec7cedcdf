"""The recommendation itself, as JSON."""

from __future__ import annotations

from service.contract.recommendation import Recommendation
from service.exports.base import Export


def write(recommendation: Recommendation) -> str:
    """The recommendation as indented JSON."""
    return recommendation.model_dump_json(indent=2) + "\n"


EXPORT = Export("json", "the recommendation with its evidence", write)
