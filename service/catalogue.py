"""The catalogue as the API shows it: every choice, what it needs, and for each worker whether it can take it."""

from __future__ import annotations

from collections.abc import Iterable

from service.contract.hardware import HardwareFacts
from service.contract.job import METHODS
from service.contract.views import Availability, Catalogue, ChoiceView, ExclusionView, LeverView, MethodView, WorkerView
from service.levers import LEVERS, METHOD_NEEDS, exclusions
from service.levers.base import Choice
from service.tasks import TASKS

Alive = dict[str, HardwareFacts]


def catalogue(workers: Iterable[WorkerView] = ()) -> Catalogue:
    """Levers, methods, tasks and exclusions, with their availability on those of the workers that are alive."""
    alive = {worker.id: worker.facts for worker in workers if worker.alive}
    return Catalogue(
        levers=tuple(
            LeverView.of(lever, choices=tuple(_choice(choice, alive) for choice in lever.choices))
            for lever in LEVERS.values()
        ),
        methods=tuple(_method(method, alive) for method in METHODS),
        tasks=tuple(TASKS),
        exclusions=tuple(ExclusionView.of(exclusion, when=dict(exclusion.when)) for exclusion in exclusions()),
    )


def _method(method: str, alive: Alive) -> MethodView:
    missing = {
        worker: next((need.sentence for need in METHOD_NEEDS[method] if not need.met(facts)), None)
        for worker, facts in alive.items()
    }
    return MethodView(name=method, workers={worker: _availability(sentence) for worker, sentence in missing.items()})


def _choice(choice: Choice, alive: Alive) -> ChoiceView:
    return ChoiceView.of(
        choice,
        needs=tuple(need.sentence for need in choice.needs),
        workers={worker: _availability(choice.missing(facts)) for worker, facts in alive.items()},
    )


def _availability(missing: str | None) -> Availability:
    return Availability(available=missing is None, why_not=missing)
