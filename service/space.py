"""The search space of one method: which choices each lever has on this hardware, and which methods it can run."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec, Method
from service.levers import LEVERS, METHOD_NEEDS

Space = dict[str, tuple[str, ...]]
NEARLY_ALL = 0.9  # of a GPU's memory: a cap of more keeps something back for others


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
        if (reason := lacks.get(f"{name}={chosen}")) and not LEVERS[name].may_do_nothing:
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
            and not (choice.evades_cap and is_capped(spec, facts))
        )
        if name in spec.search.fixed:
            found[name] = (spec.search.fixed[name],)
        elif spec.search.levers is None or asked:
            found[name] = usable
        else:
            found[name] = (lever.baseline,)
    return found


def is_capped(spec: JobSpec, facts: HardwareFacts) -> bool:
    """Whether the job's memory cap stands for a smaller GPU than this one.

    The cap holds for torch's allocator. Memory from elsewhere, such as pages of optimizer states, would lie beyond the
    cap on this GPU: fast, and counted as nothing. On the smaller one they would be paged out.
    """
    cap = spec.hardware.memory_gib
    return facts.has_own_memory and cap is not None and cap * 2**30 < NEARLY_ALL * facts.memory_bytes


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
