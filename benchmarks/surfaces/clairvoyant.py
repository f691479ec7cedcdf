"""How hard a synthetic surface is: the regret of somebody who knows every effect, but not the drawn interactions."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.surfaces import exhaustive
from benchmarks.surfaces.analytic import Analytic
from benchmarks.surfaces.lengths import arrange
from benchmarks.surfaces.mechanistic import ENCODER, STRUCTURE


def regret(surface: Analytic) -> float:
    """The true regret of what would be best without the drawn interactions of two and three choices.

    It is chosen with the exact cost of every choice, the interactions that follow from how kernels are made, memory,
    and the corners that cannot run: measurements of choices one at a time cannot tell more than that.
    """
    known = tuple(one for one in surface.world.interactions if one in (*STRUCTURE, *ENCODER))
    world = replace(surface.world, interactions=known)
    lengths = arrange(world.lengths, surface.effectives)
    _, levers, size = exhaustive.best(world, lengths, surface.reachable, surface.circumstances)
    chosen = surface.start.model_copy(
        update={
            "levers": surface.start.levers | levers,
            "effective_batch_size": size,
            "micro_batch_size": None,
        }
    )
    return surface.true_score(chosen) / surface.best - 1
