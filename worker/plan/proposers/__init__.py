"""Proposers of the next trial. Every file of this folder that defines PROPOSER adds one; there is no other list."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from service.contract.configuration import Configuration
from service.contract.states import Origin
from service.folders import declared
from service.levers import LEVERS, as_fixed, excluded, unknown
from worker.plan.space import point
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


class BadProposal(Exception):
    """A proposer failed, or proposed a configuration that no trial may have. The text names the proposer."""


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


def asked(proposer: Proposer, view: View) -> Proposal | None:
    """A proposer's next trial, or None when it has none; BadProposal where it fails, or the trial could not be used.

    A trial that repeats another or is an excluded combination would be queued again and again, as nothing is learnt.
    """
    try:
        proposal = proposer.propose(view)
    except Exception as error:
        raise BadProposal(f"the proposer {name_of(proposer)} failed: {type(error).__name__}: {error}") from error
    if proposal is not None and (reason := _refused(proposal, view)):
        request = view.baseline_request()
        title = proposal.configuration.title(request.configuration if request else None)
        raise BadProposal(f"the proposer {name_of(proposer)} proposed a trial that {reason}: {title}")
    return proposal


def _refused(proposal: Proposal, view: View) -> str | None:
    """Why a proposal cannot become a trial, as the rest of a sentence; None where it can."""
    made, origin = proposal.configuration, proposal.origin
    if made.method != view.method:
        return f"is of the method {made.method}, where {view.method} was asked for"
    if made.levers.keys() != LEVERS.keys():
        return "does not have a choice of every lever, and of no other"
    if sentence := next((text for name, choice in made.levers.items() if (text := unknown(name, choice))), None):
        return f"cannot be, as {sentence}"
    if made.key in (view.repeated if origin is Origin.repeat else view.taken):
        return "was tried before, or is under way"
    if origin not in (Origin.baseline, Origin.repeat) and not as_fixed(view.spec, made):
        return "does not have what the job fixes"
    # A user's own baseline is measured as it is, and what a version with fewer exclusions measured may be refined.
    if origin is Origin.baseline or any(made.levers == one.configuration.levers for one in view.history):
        return None
    clash = excluded(point(made, view.spec))
    return f"is excluded ({clash.reason})" if clash else None


def name_of(proposer: Proposer) -> str:
    """What a proposer is called: the name of its class."""
    return type(proposer).__name__


__all__ = ["BadProposal", "Proposal", "Proposer", "asked", "first_affordable", "name_of", "proposers"]
