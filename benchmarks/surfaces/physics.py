"""The physics of a step: its seconds and its memory, for many configurations at once.

A step's device time is that of matrix multiplications, attention, memory-bound operations, the output layer,
recomputation and transfers; where the host cannot start kernels as fast as the device runs them, launches bound it.
To this come the optimizer, waiting for batches and, once a run, loading and compiling. The micro batch is the fastest
of the ladder that fits in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.surfaces.costs import AMOUNTS, FACTORS, Costs
from benchmarks.surfaces.lengths import BATCHING, MICROS, PADDING, Arranged, Floats, Lengths

Ints = NDArray[np.int64]
TOLD = ("varlen", "flash-attention-2", "flash-attention-3")
KERNELS_A_LAYER, ELEMENTWISE_BYTES = 40, 900.0
USABLE = 0.95  # of the capacity


@dataclass(frozen=True)
class Device:
    """A device: fp32 matmul operations a second, bytes a second, seconds a launch, capacity, and how it overlaps.

    Matmuls reach half of `flops` at `half` tokens a micro batch and a hidden size of 1,024. `overlap` is the exponent
    of the norm by which device time and launches add up: 1 adds them, infinity takes the larger.
    """

    flops: float
    bandwidth: float
    launch: float
    capacity: float
    half: float
    overlap: float
    bus: float = 2e10
    context: float = 0.6e9
    cache_tokens: float = 1e9  # a micro batch of so many tokens has left the processor's caches and is 20% slower


@dataclass(frozen=True)
class Model:
    """A model's shape and which of its weights are trained."""

    parameters: float
    trained: float
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    causal: bool
    tensors: int
    load_seconds: float
    compile_seconds: float
    collate: float = 2e-7  # seconds of the host's to make one token's batch


@dataclass(frozen=True)
class Interaction:
    """Certain choices together multiply a field by a factor; infinite where they cannot run together."""

    when: Mapping[str, tuple[str, ...]]
    factor: float
    field: str = "everything"
    reason: str = ""


@dataclass(frozen=True)
class World:
    """All that decides a surface's truth."""

    device: Device
    model: Model
    lengths: Lengths
    epochs: float
    wall_clock: bool
    costs: Costs
    interactions: tuple[Interaction, ...] = ()
    infeasible: tuple[Interaction, ...] = ()
    unstable: tuple[Interaction, ...] = ()
    lacks: Mapping[str, str] = field(default_factory=dict)
    method: str = "full"
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """Scores and details of configurations: for each the micro batch, seconds of a step, bytes at rest and a sample."""

    score: Floats
    step: Floats
    micro: Floats
    largest: Floats
    rest: Floats
    slope: Floats
    once: Floats


def evaluate(world: World, arranged: Arranged, levers: Mapping[str, Ints], effective: Ints, micro: int | None) -> Found:
    """The scores of configurations: their choices by index into the lever's own names, the effective batch by index."""
    fields = _fields(world, levers)
    rest, slope, limit = _memory(world, fields)
    found = np.full(effective.shape, np.inf)
    best, largest = np.zeros(effective.shape), np.zeros(effective.shape)
    sizes = np.array(arranged.effectives)[effective]
    for at, size in enumerate(MICROS):
        if micro is not None and size != micro:
            continue
        fits = (rest + slope * size <= limit) & (size <= sizes)
        if not fits.any():
            continue
        seconds = np.where(fits, _step(world, arranged, fields, levers, effective, at), np.inf)
        better = seconds < found
        found, best = np.where(better, seconds, found), np.where(better, size, best)
        largest = np.where(fits, size, largest)
    once = world.model.load_seconds * (1 + fields["loading"]) + world.model.compile_seconds * fields["compiling"]
    steps = world.epochs * world.lengths.rows / sizes
    score = found * steps + (once if world.wall_clock else 0.0)
    bad = np.zeros(1, dtype=bool)
    for one in (*world.infeasible, *world.unstable):
        bad = bad | hits(one, levers, world.names)
    return Found(np.where(bad, np.inf, score), found, best, largest, rest, slope, once)


def observed(
    world: World, arranged: Arranged, levers: Mapping[str, Ints], effective: Ints, micro: int
) -> tuple[float, float, float, int]:
    """What a trial of one configuration sees beside its seconds.

    (tokens that a step computes, padding included; seconds of it that wait for batches; the share of a work unit that
    one micro batch of each of its shapes is; the micro batches of a step).
    """
    batching = BATCHING.index(world.names["batching"][int(levers["batching"][0])])
    padding = PADDING.index(world.names["padding"][int(levers["padding"][0])])
    at = batching, padding, MICROS.index(micro), int(effective[0])
    tokens = float(arranged.tokens[at])
    waiting = tokens * world.model.collate * float(_fields(world, levers)["stall"][0])
    return tokens, waiting, float(arranged.warmed[at]), max(1, round(float(arranged.micros[at])))


def hits(
    interaction: Interaction, levers: Mapping[str, Ints], names: Mapping[str, tuple[str, ...]]
) -> NDArray[np.bool_]:
    """Which configurations have all that an interaction asks for."""
    found = np.ones(1, dtype=bool)
    for name, choices in interaction.when.items():
        found = found & np.array([one in choices for one in names[name]])[levers[name]]
    return found


def _fields(world: World, levers: Mapping[str, Ints]) -> dict[str, Floats]:
    """Every field of the costs, combined over levers."""
    found = {name: np.ones(1) for name in FACTORS} | {name: np.zeros(1) for name in AMOUNTS}
    for name, choices in world.names.items():
        for key in {key for choice in choices for key in world.costs[name][choice]}:
            neutral = 1.0 if key in FACTORS else 0.0
            table = np.array([world.costs[name][choice].get(key, neutral) for choice in choices])[levers[name]]
            found[key] = found[key] * table if key in FACTORS else found[key] + table
    for one in world.interactions:
        found[one.field] = np.where(hits(one, levers, world.names), found[one.field] * one.factor, found[one.field])
    return found


def _memory(world: World, fields: Mapping[str, Floats]) -> tuple[Floats, Floats, float]:
    """(bytes at rest, bytes a sample, the limit)."""
    model, longest = world.model, world.lengths.longest
    frozen = model.parameters - model.trained if world.method != "full" else 0.0
    gradients = 4.0 * (1 + fields["copies"])
    weights = frozen * fields["frozen"] + model.trained * (fields["trained"] + gradients + fields["state"])
    kept = longest * model.layers * model.hidden * 68.0 * fields["activations"]
    squares = fields["square"] * model.layers * model.heads * float(longest) ** 2 * fields["activations"]
    logits = longest * model.vocabulary * 10.0 * fields["logits"]
    rest = (weights + world.device.context) * fields["fragments"]
    return rest, (kept + squares + logits) * fields["fragments"], world.device.capacity * USABLE


def _step(
    world: World,
    arranged: Arranged,
    fields: Mapping[str, Floats],
    levers: Mapping[str, Ints],
    effective: Ints,
    at: int,
) -> Floats:
    """Seconds of an optimizer step at one micro batch."""
    device, model = world.device, world.model
    where = (
        _index(world, "batching", BATCHING)[levers["batching"]],
        _index(world, "padding", PADDING)[levers["padding"]],
    )
    micros = arranged.micros[where[0], where[1], at, effective]
    tokens = arranged.tokens[where[0], where[1], at, effective]
    told = np.array([one in TOLD for one in world.names["attention"]])[levers["attention"]]
    squares = np.where(told, arranged.own[effective], arranged.squares[where[0], where[1], at, effective])
    a_micro = tokens / micros
    half = device.half * 1024 / model.hidden
    reached = a_micro / (a_micro + half) / (1 + 0.2 * np.minimum(1.0, a_micro / device.cache_tokens))
    passes = 6.0 if world.method == "full" else 4.2
    linear = tokens * passes * model.parameters / (device.flops * reached) * fields["matmul"]
    attention = squares * model.layers * model.hidden * 12.0 / (device.flops * 0.4) * fields["attention"]
    bytes_moved = tokens * model.layers * model.hidden * ELEMENTWISE_BYTES
    elementwise = bytes_moved / device.bandwidth * fields["elementwise"]
    head = tokens * model.vocabulary * 24.0 / device.bandwidth * fields["head"]
    again = (linear + attention + elementwise) / 3 * fields["recompute"]
    moved = tokens * model.layers * model.hidden * fields["transfer"] / device.bus
    unpacked = micros * 2 * model.parameters * fields["unpacking"] / device.bandwidth
    busy = linear + attention + elementwise + head + again + moved + unpacked
    adapters = 1.0 if world.method == "full" else 1.6
    started = micros * model.layers * KERNELS_A_LAYER * 3 * device.launch * fields["kernels"] * adapters
    together = (busy**device.overlap + started**device.overlap) ** (1 / device.overlap)
    update = model.trained * fields["update"] / device.bandwidth + model.tensors * fields["launches"] * device.launch
    waiting = tokens * model.collate * fields["stall"]
    found: Floats = (together + update + waiting + fields["step"]) * fields["everything"]
    return found


def _index(world: World, lever: str, names: tuple[str, ...]) -> Ints:
    return np.array([names.index(one) for one in world.names[lever]])
