"""What an export is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from service.contract.recommendation import Recommendation


@dataclass(frozen=True)
class Export:
    """A pure function from a recommendation to the text of a file, under the name that users ask for it by."""

    name: str
    summary: str
    write: Callable[[Recommendation], str]
