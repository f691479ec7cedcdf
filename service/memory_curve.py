"""The memory curve of a measurement: what every batch size took, and how fast it was. Pure."""

from __future__ import annotations

from service.contract.measurement import Measurement
from service.contract.states import ProbePhase
from service.contract.views import CurvePoint, MemoryCurve


def memory_curve(measurement: Measurement) -> MemoryCurve:
    """One point for each probe phase (eager, compiled, evaluation) and micro batch, in that order.

    Memory is that of the worst-case step; tokens/s are there where the work unit was timed at that micro batch.
    """
    points = {
        (probe.phase, probe.micro_batch_size): CurvePoint.of(
            probe,
            fits=probe.fits,
            worst_case_step_seconds=probe.seconds,
            tokens_per_second=None,
        )
        for probe in measurement.probes
    }
    for timing in measurement.curve:
        key = (ProbePhase.training, timing.micro_batch_size)
        probed = points[key].worst_case_step_seconds if key in points else None
        points[key] = CurvePoint.of(
            points.get(key, timing),
            phase=ProbePhase.training,
            fits=key not in points or points[key].fits,
            worst_case_step_seconds=probed,
            tokens_per_second=timing.tokens / timing.seconds,
        )
    configuration = measurement.configuration
    return MemoryCurve.of(
        measurement,
        levers=configuration.levers,
        method=configuration.method,
        line=measurement.memory_line,
        recommended_micro_batch=measurement.micro_batch_size,
        points=tuple(points[key] for key in sorted(points)),
    )
