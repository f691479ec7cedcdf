"""Proposers of the next trial. Every file of this folder that defines PROPOSER adds one; there is no other list."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from service.contract.configuration import Configuration
from service.contract.states import Origin
from service.folders import declared
from worker.plan.view import View


@dataclass(frozen=True)
class Proposal:
    """A configuration to try, which part of the search proposes it, and notes about it for the job's user."""

    configuration: Configuration
    origin: Origin
    notes: tuple[str, ...] = ()


def first_affordable(view: View, configurations: Iterable[Configuration], origin: Origin) -> Proposal | None:
    """The proposal of the first configuration that there is time for, or None."""
    return next((Proposal(one, origin) for one in configurations if view.budget.affords(one)), None)


class Proposer(Protocol):
    """Proposes trials of one method of a job. Proposers are asked by `order`, lowest first, until one has a proposal.

    A proposer with `always` is asked before all others, even if no worker is idle or the budget is spent.
    """

    order: int
    always: bool

    def propose(self, view: View) -> Proposal | None:
        """The next trial, or None when this proposer has none. Pure: the same view gives the same proposal."""


def proposers() -> list[Proposer]:
    """All proposers by their `order`, and their names, from the files in every folder of the package's path."""
    found: dict[str, Proposer] = declared(__name__, __path__, "PROPOSER", name_of)
    return [found[name] for name in sorted(found, key=lambda name: (found[name].order, name))]


def name_of(proposer: Proposer) -> str:
    """What a proposer is called: the name of its class."""
    return type(proposer).__name__


__all__ = ["Proposal", "Proposer", "first_affordable", "proposers"]
