"""What another version of dynotune stored, as this version reads it: the database's JSON, and files of users."""

from __future__ import annotations

from typing import Any

from service.contract.recommendation import Recommendation
from service.levers import LEVERS, unknown


def completed(stored: Any) -> Any:
    """Stored JSON whose configurations have this version's levers: those that came since are at their baselines.

    So they were measured. A lever that is no more is left out.
    """
    if isinstance(stored, list):
        return [completed(one) for one in stored] if any(isinstance(one, dict) for one in stored) else stored
    if not isinstance(stored, dict):
        return stored
    found = {name: completed(one) for name, one in stored.items()}
    if isinstance(levers := found.get("levers"), dict):
        found["levers"] = {name: levers.get(name, lever.baseline) for name, lever in LEVERS.items()}
    return found


def recommendation(stored: Any) -> Recommendation:
    """A stored recommendation; ValueError, which a ValidationError is too, where this version cannot read it."""
    found = Recommendation.model_validate(completed(stored))
    for winner in (stored, *stored.get("methods", {}).values()):
        for name, choice in winner["configuration"]["levers"].items():
            if reason := unknown(name, choice):
                raise ValueError(f"configuration.levers: {reason}")
    return found
