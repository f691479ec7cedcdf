"""What an export is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from service.contract.recommendation import Recommendation
from service.exports.words import Target


@dataclass(frozen=True)
class Export:
    """A pure function from a recommendation to the text of a file, under the name that users ask for it by.

    `file` is what the file is called if its user does not say, `fits` who it is for. An export for another trainer
    has a `target`, which says what is lost there; one without says everything, or is not made to train with.
    """

    name: str
    summary: str
    write: Callable[[Recommendation], str]
    file: str = ""
    fits: str = ""
    target: Target | None = None
