"""Guesses a trial's memory line from another trial of the job. The trial's probe begins there, and then measures.

Bytes a sample are mostly activations. The catalogue's factors follow from what the levers do (two bytes instead of
four, one layer's activations instead of all), and are not measured. So the probe begins at half of the size that they
predict: a prediction that is too large by a factor of two costs a step, not an out-of-memory error.
"""

from __future__ import annotations

import math

from service.contract.configuration import Configuration
from service.contract.measurement import Measurement, MemoryLine
from service.levers import chosen
from service.levers.batching import ROWS


def expected(
    configuration: Configuration, measured: list[Measurement], max_length: int, is_half: bool
) -> MemoryLine | None:
    """The scaled memory line of the method's measurement with the most choices in common; None where there is none.

    `is_half` says whether the checkpoint's weights have 16 bits.
    """
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
    here, there = (_factor(one, longest, max_length, is_half) for one in (configuration, nearest.configuration))
    return line.model_copy(update={"slope_bytes": line.slope_bytes * here / there, "residual": None})


def _factor(configuration: Configuration, longest: int, max_length: int, is_half: bool) -> float:
    """A number proportional to the bytes that a sample, or a packed row, takes."""
    found = float(max_length if configuration.levers["batching"] in ROWS else longest)
    return found * math.prod(choice.memory.kept(is_half) for choice in chosen(configuration.levers))
