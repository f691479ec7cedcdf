"""What a declaration can get wrong: each mistake in a sentence that names the lever, or its choice.

A wrong name or number would otherwise do nothing, or end a user's job long after the file was written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import get_args

from service.levers.base import OWN_STAGES, Choice, Exclusion, Lever, Stage, Together

MEMORY_FACTORS, SECONDS_FACTORS = (0.01, 20.0), (0.05, 20.0)  # what lies beyond is a mistake in the unit
# The one lever of which estimates and the search read these fields of Memory.
READ_OF_ONE = {
    "optimizer": ("state", "embedding_state", "gradient_copies"),
    "quantization": ("weight", "keeps_dequantised"),
}


def mistakes(levers: Mapping[str, Lever], circumstances: Mapping[str, Collection[str]]) -> list[str]:
    """A sentence for each mistake of a catalogue; `circumstances` are those of a job, with the values they may have."""
    known = {name: lever.names for name, lever in levers.items()}
    baselines = {name: lever.baseline for name, lever in levers.items()}
    found: list[str] = []
    for name, lever in levers.items():
        found += (f"the lever {name} {mistake}" for mistake in _of_lever(lever, circumstances))
        for choice in lever.choices:
            found += (f"{name}={choice.name} {mistake}" for mistake in _of_choice(lever, choice))
        rules: tuple[Exclusion | Together, ...] = (*lever.exclusions, *lever.together)
        for rule in rules:
            where = f"the lever {name} has a rule on {', '.join(rule.when)}, which"
            if name not in rule.when or len(rule.when) < 2:
                found.append(f"{where} has to name the lever itself and something else")
            there = known if isinstance(rule, Together) else {**known, **circumstances}
            found += (f"{where} {mistake}" for mistake in _unknown(rule.when, there))
        for exclusion in lever.exclusions:
            if exclusion.hits(baselines):
                found.append(f"the lever {name} excludes the baseline of {', '.join(exclusion.when)}")
            if set(exclusion.when.get(name, ())) >= set(lever.names):
                found.append(f"the lever {name} excludes all of its own choices: no value of it is left")
    return found


def _of_lever(lever: Lever, circumstances: Mapping[str, Collection[str]]) -> Iterator[str]:
    """What is wrong with a lever itself, as the rest of a sentence."""
    if len(set(lever.names)) < max(1, len(lever.names)):
        yield "needs choices, each with a name of its own"
    named = [*(lever.simulated or ()), lever.reference or lever.baseline]
    kin = [choice for family in lever.families for choice in family]
    if unknown := {lever.baseline, *named, *kin} - set(lever.names):
        yield f"names choices that it does not have: {', '.join(sorted(unknown))}"
    if len(kin) > len(set(kin)):
        yield "has a choice in two families"
    for kind, given in (("methods", lever.methods), ("tasks", lever.tasks or ())):
        there = circumstances[kind.removesuffix("s")]
        if unknown := set(given) - set(there):
            yield f"is for {kind} that there are not: {', '.join(sorted(unknown))}; there are: {', '.join(there)}"
    if lever.stage not in get_args(Stage):
        yield f"has the stage {lever.stage}; there are: {', '.join(get_args(Stage))}"
    owner = OWN_STAGES.get(lever.stage)
    if owner is not None and owner != lever.name:
        yield f"has the stage {lever.stage}, at which only the functions of the lever {owner} are called"


def _of_choice(lever: Lever, choice: Choice) -> Iterator[str]:
    """What is wrong with a choice, as the rest of a sentence."""
    if not choice.summary.strip():
        yield "has no summary"
    if choice.function and lever.stage == "data":
        yield "has a function, which nobody calls at the stage data"
    if not choice.function and lever.stage in ("optimizer", "batching", "quantised"):
        yield f"has no function, which the stage {lever.stage} calls for every choice"
    memory, effect, usual = choice.memory, choice.effect, type(choice.memory)()
    for owner, fields in READ_OF_ONE.items():
        for field in fields:
            if lever.name != owner and getattr(memory, field) != getattr(usual, field):
                yield f"says {field} of memory, which is read of the lever {owner} only"
    if lever.name == "quantization" and memory.weight is None:
        yield "does not say how many bytes a weight takes: Memory(weight=…)"
    least, most = MEMORY_FACTORS
    for factor in ("activations", "half"):
        value = getattr(memory, factor)
        if value is not None and not least <= value <= most:
            yield f"has the memory factor {factor}={value:g}; it is a factor on the baseline's, {least:g} to {most:g}"
    if any(value is not None and value < 0 for value in (memory.state, memory.embedding_state, memory.weight)):
        yield "has less than no memory"
    least, most = SECONDS_FACTORS
    for factor in ("factor", "limited", "host", "half"):
        value = getattr(effect, factor)
        if value is not None and not least <= value <= most:
            yield f"has the effect {factor}={value:g}; it is a factor on the baseline's seconds, {least:g} to {most:g}"
    if effect.spread <= 0 or effect.once < 0 or not 0 <= effect.padding <= 1:
        yield "has an effect whose spread is not above 0, once is below 0, or padding is no share"
    if choice.name == lever.baseline and (effect != type(effect)() or memory.activations != 1.0):
        yield "is the baseline, and expected effects and factors of memory are relative to it"


def _unknown(when: Mapping[str, Collection[str]], known: Mapping[str, Collection[str]]) -> Iterator[str]:
    """What a rule names that there is not, as the rest of a sentence."""
    for name, values in when.items():
        if name not in known:
            yield f"names {name}, of which there is neither a lever nor a circumstance; there are: {', '.join(known)}"
        elif not values:
            yield f"names no value of {name}"
        elif unknown := set(values) - set(known[name]):
            yield f"names values that {name} never has: {', '.join(sorted(unknown))}"
