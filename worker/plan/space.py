"""The search space of one method: which choices each lever has on this hardware, and which combinations are valid."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import product

from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec, Method
from service.levers import LEVERS, METHOD_NEEDS, circumstances, excluded

TRAINER_BATCH = 8  # TrainingArguments.per_device_train_batch_size
EFFECTIVE_CHOICES = (8, 16, 32, 64)
LEAST_STEPS_AN_EPOCH = 50  # with the largest effective batch that is tried

Space = dict[str, tuple[str, ...]]


def unavailable(facts: HardwareFacts, method: Method) -> str | None:
    """Why a method cannot run on this hardware, or None."""
    for need in METHOD_NEEDS[method]:
        if not need.met(facts):
            return f"method {method} {need.sentence}"
    return None


def blocked(spec: JobSpec, facts: HardwareFacts, lacks: Mapping[str, str]) -> str | None:
    """Why a fixed choice cannot run on this hardware or with the job's model, which lacks `lacks`; or None."""
    for name, chosen in spec.search.fixed.items():
        missing = LEVERS[name].choice(chosen).missing(facts, asked=True)
        if missing:
            return f"search.fixed: {name}={chosen} {missing}"
        if reason := lacks.get(f"{name}={chosen}"):
            return f"search.fixed: {name}={chosen} cannot be with this model: {reason}"
    return None


def space(spec: JobSpec, facts: HardwareFacts, half: bool = False) -> Space:
    """Each lever's choices: the one that the job fixes, all available ones where it is searched, else the baseline.

    `half` is whether the checkpoint's weights are known to have 16 bits.
    """
    found: Space = {}
    for name, lever in LEVERS.items():
        asked = spec.search.levers is not None and name in spec.search.levers
        usable = tuple(
            choice.name
            for choice in lever.choices
            if (choice.searched or (half and choice.searched_of_half))
            and (not choice.changes_learning or spec.search.quality == "allow")
            and choice.missing(facts, asked) is None
        )
        if name in spec.search.fixed:
            found[name] = (spec.search.fixed[name],)
        elif spec.search.levers is None or asked:
            found[name] = usable
        else:
            found[name] = (lever.baseline,)
    return found


def possible(name: str, choice: str, lacks: Collection[str]) -> str:
    """The choice; or, where the job's model lacks it (`lever=choice`), the lever's first choice that the model has.

    For attention that is eager, which transformers takes as well where a model has no sdpa.
    """
    there = [one for one in (choice, *LEVERS[name].names) if f"{name}={one}" not in lacks]
    return there[0] if there else choice


def without(choices: Space, lacks: Collection[str]) -> Space:
    """The space without the choices (`lever=choice`) that the job's model cannot have."""
    return {
        name: tuple(one for one in options if f"{name}={one}" not in lacks) or (possible(name, options[0], lacks),)
        for name, options in choices.items()
    }


def applicable(choices: Space, method: Method, task: str) -> Space:
    """The space of one method and task: a lever that has no effect with them keeps only its baseline."""
    return {
        name: options if LEVERS[name].applies(method, task) else (LEVERS[name].baseline,)
        for name, options in choices.items()
    }


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


def learning_rate(spec: JobSpec, effective: int) -> float:
    """The user's learning rate if they set the effective batch; else it is scaled from Trainer's batch of 8.

    It is scaled by the square root of the ratio, as adaptive optimizers need (Malladi et al. 2022, arXiv 2205.10287).
    """
    rate = spec.training.learning_rate
    if spec.training.effective_batch_size is not None:
        return rate
    return float(f"{rate * (effective / TRAINER_BATCH) ** 0.5:.6g}")


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
        learning_rate=learning_rate(spec, effective),
    )
    return None if excluded(point(made, spec)) else made


def repaired(spec: JobSpec, method: Method, levers: dict[str, str], choices: Space) -> dict[str, str]:
    """The choices, with one of every two that exclude each other set back to its lever's baseline.

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


def every(spec: JobSpec, method: Method, choices: Space, effectives: tuple[int, ...]) -> Iterator[Configuration]:
    """All valid configurations, in a fixed order."""
    for combination in product(*choices.values()):
        for effective in effectives:
            made = make(spec, method, dict(zip(choices, combination, strict=True)), effective)
            if made is not None:
                yield made
