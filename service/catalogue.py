"""The catalogue as JSON: every choice, what it needs, and per worker whether it is available and why not."""

from __future__ import annotations

from typing import Any

from service.contract.hardware import HardwareFacts
from service.contract.job import METHODS, TASKS
from service.levers import LEVERS, METHOD_NEEDS, exclusions
from service.levers.base import Choice


def catalogue(workers: list[dict[str, Any]]) -> dict[str, Any]:
    """Levers, methods, tasks and exclusions, with the availability on the living workers."""
    alive = {one["id"]: HardwareFacts.model_validate(one["facts"]) for one in workers if one["alive"]}
    return {
        "levers": [
            {
                "name": lever.name,
                "summary": lever.summary,
                "source": lever.source,
                "baseline": lever.baseline,
                "choices": [_choice(choice, alive) for choice in lever.choices],
            }
            for lever in LEVERS.values()
        ],
        "methods": [
            {
                "name": method,
                "workers": {
                    worker: _availability(
                        next((need.sentence for need in METHOD_NEEDS[method] if not need.met(facts)), None)
                    )
                    for worker, facts in alive.items()
                },
            }
            for method in METHODS
        ],
        "tasks": list(TASKS),
        "exclusions": [
            {
                "when": {name: list(values) for name, values in exclusion.when.items()},
                "reason": exclusion.reason,
                "reference": exclusion.reference,
            }
            for exclusion in exclusions()
        ],
    }


def _choice(choice: Choice, alive: dict[str, HardwareFacts]) -> dict[str, Any]:
    return {
        "name": choice.name,
        "summary": choice.summary,
        "searched": choice.searched,
        "changes_numerics": choice.changes_numerics,
        "changes_order": choice.changes_order,
        "changes_learning": choice.changes_learning,
        "needs": [need.sentence for need in choice.needs],
        "workers": {worker: _availability(choice.missing(facts)) for worker, facts in alive.items()},
    }


def _availability(missing: str | None) -> dict[str, Any]:
    return {"available": missing is None, "why_not": missing}
