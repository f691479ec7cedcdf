"""The best of all valid configurations, exactly: enumerated after choices that cannot be in a best one are left out.

A choice is left out if it is in no helpful interaction, and another choice of its lever is at least as good in every
field of the costs and in no exclusion, corner or harmful interaction that the first is not in. No score falls when a
field rises (physics.py), so to replace the first by the other never makes a configuration worse, and never invalid.
Levers without any effect are the special case in which all choices are equal; the baseline is kept then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from math import prod

import numpy as np
from numpy.typing import NDArray

from benchmarks.surfaces.costs import FACTORS
from benchmarks.surfaces.lengths import Arranged
from benchmarks.surfaces.physics import TOLD, Ints, World, evaluate
from service.levers import LEVERS, exclusions

CHUNK = 100_000
NEAR = 1.02  # times the best: what counts as having found it, for `switches`
MOST_SUBSETS = 14  # levers by which the best may differ from a start, for the subsets to be listed
Options = Mapping[str, tuple[str, ...]]


def relevant(options: Options, circumstances: Mapping[str, str]) -> list[dict[str, tuple[str, ...]]]:
    """The exclusions that can hold in a space, each without the parts that always hold."""
    found = []
    for exclusion in exclusions():
        when = {}
        for name, values in exclusion.when.items():
            if name in circumstances:
                if circumstances[name] not in values:
                    break
            elif not set(options[name]) & set(values):
                break
            elif not set(options[name]) <= set(values):
                when[name] = values
        else:
            found.append(when)
    return found


def pruned(world: World, options: Options, rules: list[dict[str, tuple[str, ...]]]) -> dict[str, tuple[str, ...]]:
    """The choices that may be in a best configuration."""
    return {
        name: choices if name in ("batching", "padding") else _undominated(world, name, choices, rules)
        for name, choices in options.items()
    }


def _undominated(
    world: World, name: str, choices: tuple[str, ...], rules: list[dict[str, tuple[str, ...]]]
) -> tuple[str, ...]:
    first = LEVERS[name].baseline
    kept: list[str] = []
    for one in sorted(choices, key=lambda choice: choice != first):
        if not any(_dominates(world, name, other, one, rules) for other in kept):
            kept = [*(other for other in kept if not _dominates(world, name, one, other, rules)), one]
    return tuple(choice for choice in choices if choice in kept)


def _dominates(world: World, name: str, a: str, b: str, rules: list[dict[str, tuple[str, ...]]]) -> bool:
    """Whether b may be left out as a is there."""
    if name == "attention" and (a in TOLD) < (b in TOLD):
        return False
    costs = world.costs[name]
    for key in costs[a].keys() | costs[b].keys():
        neutral = 1.0 if key in FACTORS else 0.0
        if costs[a].get(key, neutral) > costs[b].get(key, neutral):
            return False
    harmful = [one.when for one in world.interactions if one.factor > 1]
    harmful += [one.when for one in (*world.infeasible, *world.unstable)]
    helpful = [one.when for one in world.interactions if one.factor < 1]
    hurts = any(a in when.get(name, ()) and b not in when[name] for when in (*rules, *harmful))
    return not hurts and not any(b in when.get(name, ()) and a not in when[name] for when in helpful)


def size(options: Options, effectives: tuple[int, ...]) -> int:
    """How many combinations there are, invalid ones included."""
    return prod(len(choices) for choices in options.values()) * len(effectives)


def chunks(
    world: World, options: Options, effectives: tuple[int, ...], rules: list[dict[str, tuple[str, ...]]]
) -> Iterator[tuple[dict[str, Ints], Ints]]:
    """All valid configurations as (choices by index into the world's names, index of the effective batch)."""
    active = [name for name, choices in options.items() if len(choices) > 1]
    tables = {name: np.array([world.names[name].index(one) for one in choices]) for name, choices in options.items()}
    lengths = [len(options[name]) for name in active] + [len(effectives)]
    total = prod(lengths)
    for start in range(0, total, CHUNK):
        numbers = np.arange(start, min(start + CHUNK, total))
        parts = np.unravel_index(numbers, lengths)
        levers = {name: tables[name][part] for name, part in zip(active, parts[:-1], strict=True)}
        valid = ~np.broadcast_to(_excluded(world, levers, rules), numbers.shape)
        yield (
            {name: levers[name][valid] if name in levers else tables[name] for name in options},
            parts[-1][valid].astype(np.int64),
        )


def _excluded(world: World, levers: Mapping[str, Ints], rules: list[dict[str, tuple[str, ...]]]) -> NDArray[np.bool_]:
    """Which combinations an exclusion forbids; a part of one that concerns a lever of one choice always holds."""
    bad = np.zeros(1, dtype=bool)
    for when in rules:
        hit = np.ones(1, dtype=bool)
        for name, values in when.items():
            hit = hit & np.array([one in values for one in world.names[name]])[levers[name]]
        bad = bad | hit
    return bad


def best(
    world: World, arranged: Arranged, options: Options, circumstances: Mapping[str, str]
) -> tuple[float, dict[str, str], int]:
    """(the best score, its choices, its effective batch)."""
    kept = pruned(world, options, relevant(options, circumstances))
    rules = relevant(kept, circumstances)
    lowest, at, effective = np.inf, {name: choices[0] for name, choices in kept.items()}, arranged.effectives[0]
    for levers, sizes in chunks(world, kept, arranged.effectives, rules):
        if not len(sizes):
            continue
        scores = evaluate(world, arranged, levers, sizes, None).score
        where = int(scores.argmin())
        if scores[where] < lowest:
            lowest, effective = float(scores[where]), arranged.effectives[int(sizes[where])]
            at = {
                name: world.names[name][int(index[where] if len(index) > 1 else index[0])]
                for name, index in levers.items()
            }
    return lowest, at, effective


def switches(
    world: World,
    arranged: Arranged,
    found: tuple[float, dict[str, str], int],
    starts: list[dict[str, str]],
    circumstances: Mapping[str, str],
) -> int:
    """The fewest levers of the best to be switched in one of the starts to come within 2% of the best.

    The effective batch is the best's throughout, and no switch.
    """
    score, top, effective = found
    return min(
        (_from(world, arranged, score * NEAR, (top, effective), start, circumstances) for start in starts),
        default=0,
    )


def _from(
    world: World,
    arranged: Arranged,
    enough: float,
    top: tuple[dict[str, str], int],
    start: dict[str, str],
    circumstances: Mapping[str, str],
) -> int:
    """The switches from one start."""
    levers, effective = top
    different = [name for name in levers if levers[name] != start[name]]
    if len(different) > MOST_SUBSETS:
        return MOST_SUBSETS + 1
    at = arranged.effectives.index(effective)
    for count in range(len(different) + 1):
        subsets = list(combinations(different, count))
        tried = [{name: (levers if name in subset else start)[name] for name in levers} for subset in subsets]
        valid = [one for one in tried if not any(rule.hits({**one, **circumstances}) for rule in exclusions())]
        if not valid:
            continue
        index = {name: np.array([world.names[name].index(one[name]) for one in valid]) for name in levers}
        if (evaluate(world, arranged, index, np.full(len(valid), at), None).score <= enough).any():
            return count
    return len(different)
