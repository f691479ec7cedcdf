"""Configurations of a search space: which combinations are valid, and with which batch and learning rate they train."""

from __future__ import annotations

from service.contract.configuration import Configuration
from service.contract.job import JobSpec, Method
from service.levers import LEVERS, circumstances, excluded
from service.scaling import LEAST_STEPS_AN_EPOCH, TRAINER_BATCH, learning_rate
from service.space import Space

EFFECTIVE_CHOICES = (8, 16, 32, 64)


def inside(configuration: Configuration, choices: Space, task: str) -> bool:
    """Whether a configuration is in the space. The baseline need not be, as it ignores what is fixed or searched."""
    return all(
        choice in choices[name] or not LEVERS[name].applies(configuration.method, task)
        for name, choice in configuration.levers.items()
    )


def effective_choices(spec: JobSpec, rows: int | None) -> tuple[int, ...]:
    """The effective batches to try: the user's, or all of EFFECTIVE_CHOICES that leave 50 optimizer steps an epoch."""
    given = spec.training.effective_batch_size
    if given is not None:
        return (given,)
    most = max(TRAINER_BATCH, (rows or 0) // LEAST_STEPS_AN_EPOCH)
    return tuple(size for size in EFFECTIVE_CHOICES if size <= most)


def point(configuration: Configuration, spec: JobSpec) -> dict[str, str]:
    """What exclusions are checked against: the configuration's choice for every lever, and the job's circumstances."""
    return {**configuration.levers, **circumstances(spec, configuration.method)}


def make(spec: JobSpec, method: Method, levers: dict[str, str], effective: int) -> Configuration | None:
    """The configuration of these choices, or None when it is an excluded combination.

    Levers without an effect with the method or the task stay at their baseline.
    """
    chosen = {
        name: levers[name] if lever.applies(method, spec.task) else lever.baseline for name, lever in LEVERS.items()
    }
    made = Configuration(
        method=method,
        levers=chosen,
        effective_batch_size=effective,
        learning_rate=learning_rate(spec, method, effective, chosen["optimizer"]),
    )
    return None if excluded(point(made, spec)) else made


def repaired(spec: JobSpec, method: Method, levers: dict[str, str], choices: Space) -> dict[str, str]:
    """The choices, with one of every two that exclude each other set back to its lever's baseline, if `choices` has it.

    With many levers, most random draws would otherwise be invalid because of two levers that hardly matter.
    """
    found = dict(levers)
    for _ in range(len(LEVERS)):
        clash = excluded({**found, **circumstances(spec, method)})
        if clash is None:
            break
        movable = [
            name
            for name in clash.when
            if name in LEVERS and found[name] != LEVERS[name].baseline and LEVERS[name].baseline in choices[name]
        ]
        if not movable:
            break
        found[movable[-1]] = LEVERS[movable[-1]].baseline
    return found
