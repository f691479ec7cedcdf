"""Proposers of the next trial. Each file of this folder that has a PROPOSER declares one; nothing else lists them."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from service.contract.configuration import Configuration
from service.contract.states import Origin
from worker.plan.view import View


@dataclass(frozen=True)
class Proposal:
    """A configuration to try, where it comes from, and what the job is to be told about it."""

    configuration: Configuration
    origin: Origin
    notes: tuple[str, ...] = ()


class Proposer(Protocol):
    """Proposes trials of one method of a job. Proposers are asked by `order`, lowest first, until one has a proposal.

    One with `always` is asked before all others, whether or not a worker is idle and the budget allows a trial.
    """

    order: int
    always: bool

    def propose(self, view: View) -> Proposal | None:
        """The next trial, or None when this proposer has none. Pure: the same view gives the same proposal."""


def proposers() -> list[Proposer]:
    """All proposers, sorted by the `order` that each declares. Looks at every folder of the package's path."""
    modules = [import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
    found: list[Proposer] = [module.PROPOSER for module in modules if hasattr(module, "PROPOSER")]
    return sorted(found, key=lambda proposer: proposer.order)


__all__ = ["Proposal", "Proposer", "proposers"]
