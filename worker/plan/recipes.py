"""Known-good recipes for a device, and single changes around the best: what a person would try first."""

from __future__ import annotations

from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec, Method
from service.contract.measurement import Measurement
from service.levers import LEVERS
from worker.plan.space import Space, make

# Preferred choices, best first; the first that the space offers is taken.
PRECISION = ("bf16-mixed", "fp16-mixed", "tf32", "fp32")
BATCHING = {
    "cpu": ("grouped", "token-budget", "packed", "sorted"),
    "cuda": ("packed", "token-budget", "grouped", "sorted"),
}
# Single changes worth a trial around the best so far, dear ones last.
CHANGES: tuple[tuple[str, str], ...] = (
    ("head", "chunked"),
    ("kernels", "liger"),
    ("attention", "eager"),
    ("optimizer", "adamw-foreach"),
    ("quantization", "nf4"),
    ("padding", "multiple-8"),
    ("compile", "per-layer"),
    ("head", "cut-cross-entropy"),
    ("optimizer", "adamw-8bit"),
    ("checkpointing", "selective"),
    ("checkpointing", "full"),
)


def recipes(spec: JobSpec, facts: HardwareFacts, method: Method, choices: Space, effective: int) -> list[Configuration]:
    """The device's recipes, one a batching, within the space."""

    def first(lever: str, preferred: tuple[str, ...]) -> str:
        return next((choice for choice in preferred if choice in choices[lever]), choices[lever][0])

    common = {name: first(name, (lever.baseline,)) for name, lever in LEVERS.items()}
    # What is only emulated here is tried later, if it was asked for.
    common["precision"] = first("precision", tuple(one for one in PRECISION if _native(one, facts)))
    found = []
    for batching in BATCHING[facts.device]:
        if batching in choices["batching"]:
            made = make(spec, method, {**common, "batching": batching}, effective)
            if made:
                found.append(made)
    if not found:
        made = make(spec, method, {**common, "batching": choices["batching"][0]}, effective)
        found += [made] if made else []
    return found


def _native(precision: str, facts: HardwareFacts) -> bool:
    return LEVERS["precision"].choice(precision).missing(facts) is None


def changes(spec: JobSpec, found: Measurement, choices: Space) -> list[Configuration]:
    """The best found with one lever changed; less memory for more time only where memory holds the batch small."""
    best, made = found.configuration, []
    for lever, choice in CHANGES:
        if choice not in choices[lever] or best.levers[lever] == choice:
            continue
        if lever == "checkpointing" and has_room(found):
            continue
        made.append(make(spec, best.method, {**best.levers, lever: choice}, best.effective_batch_size))
    return [one for one in made if one]


def has_room(found: Measurement) -> bool:
    """Whether twice the fastest micro batch fits, so that memory is not what slows it down."""
    return 2 * (found.micro_batch_size or 1) <= (found.predicted_micro_batch or 0)
