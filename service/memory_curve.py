"""The memory curve of a measurement: what every batch size took, and how fast it was. Pure."""

from __future__ import annotations

from typing import Any

from service.contract.measurement import Measurement


def memory_curve(measurement: Measurement) -> dict[str, Any]:
    """Points by micro batch: peak and reserved bytes of the worst case, tokens/s where the work unit was timed.

    `fits: false` ran out of memory. Phases are the eager probe, the compiled one, and the evaluation's.
    """
    timed = {timing.micro_batch_size: timing for timing in measurement.curve}
    points: dict[tuple[str, int], dict[str, Any]] = {}
    for probe in measurement.probes:
        points[(probe.phase, probe.micro_batch_size)] = {
            "phase": probe.phase,
            "micro_batch_size": probe.micro_batch_size,
            "fits": probe.peak_bytes is not None,
            "peak_bytes": probe.peak_bytes,
            "reserved_bytes": probe.reserved_bytes,
            "worst_case_step_seconds": probe.seconds,
            "tokens_per_second": None,
        }
    for size, timing in timed.items():
        point = points.setdefault(
            ("training", size),
            {
                "phase": "training",
                "micro_batch_size": size,
                "fits": True,
                "peak_bytes": timing.peak_bytes,
                "reserved_bytes": timing.reserved_bytes,
                "worst_case_step_seconds": None,
            },
        )
        point["tokens_per_second"] = timing.tokens / timing.seconds
    line = measurement.memory_line
    return {
        "levers": measurement.configuration.levers,
        "method": measurement.configuration.method,
        "capacity_bytes": measurement.capacity_bytes,
        "line": line.model_dump() if line else None,
        "largest_micro_batch": measurement.largest_micro_batch,
        "limited_by": measurement.limited_by,
        "recommended_micro_batch": measurement.micro_batch_size,
        "evaluation_batch_size": measurement.evaluation_batch_size,
        "points": [points[key] for key in sorted(points)],
    }
