"""Synthetic surfaces over the real catalogue: the mechanistic physics with drawn coefficients, effects and corners.

Each is drawn from its number: a job, a device, a model, every cost perturbed, an effect of its own for many choices,
interactions of two and three choices (-5% to +5% of the time, docs/decisions/0034), and pairs of choices that cannot
run or are unstable. Of two consecutive ones the first is drawn again until its best lies at least three switches from
the baseline and from every recipe; the second's job often restricts its search to some levers, as users do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.surfaces import exhaustive
from benchmarks.surfaces.analytic import Analytic
from benchmarks.surfaces.costs import FACTORS, Costs, Form
from benchmarks.surfaces.lengths import Lengths
from benchmarks.surfaces.mechanistic import DENSE, DEVICES, ENCODER, MODELS, STRUCTURE, WITH_DROPOUT, costs
from benchmarks.surfaces.physics import Interaction, Model, World
from benchmarks.surfaces.workers import H200, LARGE_CPU, OLD_CPU, RTX_3080_TI, RTX_4090, SMALL_CPU
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.levers import LEVERS, circumstances, exclusions
from service.space import Space, applicable, space, without
from worker.plan.space import effective_choices

COUNT = 56
FAR = 3  # switches
MOST_COMBINATIONS = 1_500_000  # after pruning, that are enumerated
PAIRS, TRIPLES, IMPOSSIBLE, UNSTABLE = 7, 4, 2, 2
SHORTEST = 20.0  # seconds that the fastest run takes at least
STRONGEST = (math.log(0.95), math.log(1.05))
BYTES = ("frozen", "trained", "state", "copies")  # of a weight, of its state and its gradient, by their formats
# Levers that may be left without any effect on a surface, so that fewer combinations are enumerated.
MAY_BE_INERT = ("cache", "activations", "normalisation", "vocabulary", "allocator", "loading", "kernels", "head")
WORKERS: tuple[tuple[HardwareFacts, str], ...] = (
    (RTX_3080_TI, "3080ti"),
    (RTX_4090, "4090"),
    (H200, "h200"),
    (SMALL_CPU, "cpu"),
    (LARGE_CPU, "cpu"),
    (OLD_CPU, "cpu"),
)
# (task, method, model on a GPU, model on a CPU)
JOBS: tuple[tuple[str, Form, str, str], ...] = (
    ("causal-lm", "lora", "1b-lora", "cpu-lora"),
    ("causal-lm", "full", "1b-full", "cpu-full"),
    ("causal-lm", "qlora", "8b-lora", "cpu-lora"),
    ("causal-lm", "lora", "8b-lora", "cpu-lora"),
    ("sequence-classification", "full", "bert", "cpu-encoder"),
    ("masked-lm", "full", "bert", "cpu-encoder"),
)
SMALL: dict[str, Model] = {
    "cpu-full": replace(MODELS["cpu-lora"], trained=1.3e7, tensors=57),
    "cpu-encoder": replace(MODELS["cpu-lora"], trained=1.3e7, tensors=100, vocabulary=0, causal=False),
}


@dataclass(frozen=True)
class Drawn:
    """A job as drawn, before effects."""

    spec: JobSpec
    facts: HardwareFacts
    world: World
    options: Space


def synthetic(number: int, attempt: int) -> Analytic | None:
    """One attempt at a surface; None where it has too many combinations, no good one, or is not far enough."""
    rng = np.random.default_rng((number, attempt))
    drawn = _job(rng, number)
    world = _with_effects(rng, drawn)
    found = Analytic("synthetic", f"synthetic-{number:02d}", drawn.spec, drawn.facts, world)
    world = _small_enough(rng, found)
    found = Analytic("synthetic", found.name, drawn.spec, drawn.facts, world)
    rules = exhaustive.relevant(found.options, found.circumstances)
    kept = exhaustive.pruned(found.world, found.options, rules)
    return found if exhaustive.size(kept, found.effectives) <= MOST_COMBINATIONS else None


def accepted(found: Analytic, number: int) -> bool:
    """Whether a surface has something that runs, for long enough, and is as far as its number asks."""
    seconds = found.found[0]
    return math.isfinite(seconds) and seconds >= SHORTEST and (number % 2 == 1 or found.switches >= FAR)


def _job(rng: np.random.Generator, number: int) -> Drawn:
    """The job, the worker and the coefficients."""
    # Of six workers three are GPUs; jobs and workers are paired so that all pairs come up.
    facts, device = WORKERS[number % len(WORKERS)] if rng.random() < 0.5 else WORKERS[int(rng.integers(len(WORKERS)))]
    task, method, large, small = JOBS[int(rng.integers(len(JOBS)))]
    name = small if facts.device == "cpu" else large
    lengths = Lengths(
        median=float(np.exp(rng.uniform(math.log(40), math.log(400)))),
        spread=float(rng.uniform(0.1, 1.1)),
        longest=int(rng.choice([128, 256, 512, 1024])),
        rows=int(rng.choice([600, 2000, 5000, 20_000] if facts.device == "cpu" else [2000, 10_000, 50_000])),
        seed=number,
    )
    training: dict[str, Any] = {"epochs": float(rng.choice([1, 3]))}
    if rng.random() < 0.5:
        training["effective_batch_size"] = int(rng.choice([8, 16, 32, 64]))
    restricted = number % 2 == 1 and rng.random() < 0.6
    levers = [str(one) for one in rng.choice(list(LEVERS), 7, replace=False)] if restricted else None
    search = {
        "trials": 1000,
        "minutes": 10_000,
        "quality": str(rng.choice(["preserve", "preserve", "allow"])),
        "objective": str(rng.choice(["wall-clock", "wall-clock", "throughput"])),
        "levers": levers and sorted({*levers, "precision", "attention", "compile", "padding", "batching"}),
    }
    spec = JobSpec.model_validate(
        {
            "name": f"synthetic-{number:02d}",
            # On a host the model is another, made for it, whose weights have 32 bits.
            "model": {
                "source": "made-up",
                "weights": "pretrained" if facts.device == "cuda" and large.startswith(("1b", "8b")) else "random",
            },
            "task": task,
            "dataset": {"source": "made-up", "max_length": lengths.longest},
            "method": method,
            "training": training,
            "search": search,
        }
    )
    checkpoint = "bf16" if spec.model.weights == "pretrained" else "fp32"
    world = _world(rng, spec, facts, device, SMALL.get(name) or MODELS[name], lengths, checkpoint)
    return Drawn(spec, facts, world, applicable(without(space(spec, facts), world.lacks), method, task))


def _world(
    rng: np.random.Generator,
    spec: JobSpec,
    facts: HardwareFacts,
    device: str,
    model: Model,
    lengths: Lengths,
    checkpoint: str,
) -> World:
    """The physics with perturbed figures of model and device."""

    def near(spread: float) -> float:
        return float(np.exp(rng.normal(0, spread)))

    base, scale = DEVICES[device], near(0.4)
    table = _perturbed(rng, costs(facts.device, device, spec.method[0], checkpoint))
    if checkpoint == "fp32":  # then these are the same arithmetic under two names
        table["precision"]["checkpoint"] = table["precision"]["fp32"]
    return World(
        device=replace(
            base,
            flops=base.flops * near(0.3) * facts.cores / (4 if facts.device == "cpu" else facts.cores),
            bandwidth=base.bandwidth * near(0.3),
            launch=base.launch * near(0.5),
            capacity=float(facts.memory_bytes),
            half=base.half * near(0.5),
            cache_tokens=base.cache_tokens * near(0.7),
        ),
        model=replace(
            model,
            parameters=model.parameters * scale,
            trained=model.trained * scale,
            load_seconds=model.load_seconds * near(0.4),
            compile_seconds=model.compile_seconds * near(0.5),
            collate=model.collate * near(1.0),
        ),
        lengths=lengths,
        epochs=spec.training.epochs,
        wall_clock=spec.search.objective == "wall-clock",
        costs=table,
        interactions=STRUCTURE if model.causal else (*STRUCTURE, *ENCODER),
        lacks=DENSE | WITH_DROPOUT if not model.causal and rng.random() < 0.5 else DENSE,
    )


def _perturbed(rng: np.random.Generator, table: Costs) -> Costs:
    """The costs, each changed at random, and an effect of its own on the whole time for many choices."""
    found: Costs = {}
    for name, choices in table.items():
        found[name] = {}
        for choice, cost in choices.items():
            changed = {key: value * float(np.exp(rng.normal(0, _spread(key)))) for key, value in sorted(cost.items())}
            if name not in ("experts", "evaluation") and rng.random() < 0.35:
                changed["everything"] = float(np.exp(rng.normal(0, 0.05)))
            found[name][choice] = changed
    return found


def _spread(field: str) -> float:
    """How unsure a cost is: the standard deviation of its logarithm. How many bytes a number takes is known."""
    if field in BYTES:
        return 0.02
    return 0.1 if field in FACTORS else 0.35


def _with_effects(rng: np.random.Generator, drawn: Drawn) -> World:
    """The world with interactions and corners between choices that can be together."""
    interactions = list(drawn.world.interactions)
    for count, parts in ((PAIRS, 2), (TRIPLES, 3)):
        for _ in range(count):
            when = _together(rng, drawn, parts)
            if when:
                interactions.append(Interaction(when, float(np.exp(rng.uniform(*STRONGEST)))))
    impossible = [_together(rng, drawn, 2) for _ in range(IMPOSSIBLE)]
    unstable = [_together(rng, drawn, 2) for _ in range(UNSTABLE)]
    return replace(
        drawn.world,
        interactions=tuple(interactions),
        infeasible=tuple(
            Interaction(when, math.inf, reason="out of memory at a micro batch of 1") for when in impossible if when
        ),
        unstable=tuple(
            Interaction(when, math.inf, reason="the loss of step 0 is not the baseline's") for when in unstable if when
        ),
    )


def _together(rng: np.random.Generator, drawn: Drawn, parts: int) -> dict[str, tuple[str, ...]] | None:
    """Choices other than the baseline's, of that many levers, which a valid configuration has together."""
    facts = circumstances(drawn.spec, drawn.spec.method[0])
    rules = exclusions()
    open_levers = [name for name, options in drawn.options.items() if len(options) > 1 and name != "experts"]
    if len(open_levers) < parts:
        return None
    for _ in range(200):
        names = [str(one) for one in rng.choice(open_levers, parts, replace=False)]
        others = {name: [one for one in drawn.options[name] if one != LEVERS[name].baseline] for name in names}
        when = {name: str(rng.choice(options)) for name, options in others.items()}
        start = {name: options[0] for name, options in drawn.options.items()}
        point = {**start, **when, **facts}
        if not any(rule.hits(point) for rule in rules):
            return {name: (choice,) for name, choice in sorted(when.items())}
    return None


def _small_enough(rng: np.random.Generator, found: Analytic) -> World:
    """The world with levers made inert until its combinations can be enumerated."""
    world = found.world
    effectives = effective_choices(found.spec, found.rows)
    for name in rng.permutation(MAY_BE_INERT):
        rules = exhaustive.relevant(found.options, found.circumstances)
        if exhaustive.size(exhaustive.pruned(world, found.options, rules), effectives) <= MOST_COMBINATIONS:
            break
        world = _without(world, str(name))
    return world


def _without(world: World, name: str) -> World:
    """The world in which a lever has no effect at all."""

    def others(corners: tuple[Interaction, ...]) -> tuple[Interaction, ...]:
        return tuple(one for one in corners if name not in one.when)

    return replace(
        world,
        costs={**world.costs, name: {choice: {} for choice in world.costs[name]}},
        interactions=others(world.interactions),
        infeasible=others(world.infeasible),
        unstable=others(world.unstable),
    )
