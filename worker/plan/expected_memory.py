"""What a trial's memory line may look like, from another trial of the job: where its probe begins, never its answer.

Bytes a sample are mostly activations. The factors are what the levers' definitions say (two bytes for four, one
layer's activations for all), not measurements: the probe starts at half of what follows from them, so that being
wrong by a factor of two costs a step, not an out-of-memory error.
"""

from __future__ import annotations

from service.contract.configuration import Configuration
from service.contract.measurement import Measurement, MemoryLine
from service.levers.batching import ROWS

FACTORS: dict[str, dict[str, float]] = {
    "precision": {
        "bf16-mixed": 0.6,
        "bf16-mixed-uncached": 0.6,
        "fp16-mixed": 0.6,
        "bf16": 0.5,
        "fp16": 0.5,
        "fp64": 2.0,
    },
    "head": {"chunked": 0.4, "cut-cross-entropy": 0.4, "liger": 0.4},
    "attention": {"eager": 1.3},
    "checkpointing": {"full": 0.4, "every-2": 0.7, "every-4": 0.85, "selective": 0.6, "offloaded": 0.3},
}


def expected(configuration: Configuration, measured: list[Measurement], max_length: int) -> MemoryLine | None:
    """The line of the most alike measurement, scaled; None when none of the same method has one."""
    alike = [
        (sum(one.configuration.levers[name] == choice for name, choice in configuration.levers.items()), one)
        for one in measured
        if one.memory_line is not None and one.configuration.method == configuration.method
    ]
    if not alike:
        return None
    nearest = max(alike, key=lambda pair: pair[0])[1]
    line = nearest.memory_line
    assert line is not None
    longest = nearest.dataset.longest if nearest.dataset else max_length
    ratio = _factor(configuration, longest, max_length) / _factor(nearest.configuration, longest, max_length)
    return MemoryLine(rest_bytes=line.rest_bytes, slope_bytes=line.slope_bytes * ratio, update_bytes=line.update_bytes)


def _factor(configuration: Configuration, longest: int, max_length: int) -> float:
    """Bytes a sample (or packed row), up to a constant."""
    found = float(max_length if configuration.levers["batching"] in ROWS else longest)
    for name, factors in FACTORS.items():
        found *= factors.get(configuration.levers[name], 1.0)
    return found
