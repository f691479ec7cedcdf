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
        (probe.phase, probe.micro_batch_size): CurvePoint(
            phase=probe.phase,
            micro_batch_size=probe.micro_batch_size,
            fits=probe.peak_bytes is not None,
            peak_bytes=probe.peak_bytes,
            reserved_bytes=probe.reserved_bytes,
            worst_case_step_seconds=probe.seconds,
            tokens_per_second=None,
        )
        for probe in measurement.probes
    }
    for timing in measurement.curve:
        key = (ProbePhase.training, timing.micro_batch_size)
        point = points.get(key) or CurvePoint(
            phase=ProbePhase.training,
            micro_batch_size=timing.micro_batch_size,
            fits=True,
            peak_bytes=timing.peak_bytes,
            reserved_bytes=timing.reserved_bytes,
            worst_case_step_seconds=None,
            tokens_per_second=None,
        )
        points[key] = point.model_copy(update={"tokens_per_second": timing.tokens / timing.seconds})
    return MemoryCurve(
        levers=measurement.configuration.levers,
        method=measurement.configuration.method,
        capacity_bytes=measurement.capacity_bytes,
        line=measurement.memory_line,
        largest_micro_batch=measurement.largest_micro_batch,
        limited_by=measurement.limited_by,
        recommended_micro_batch=measurement.micro_batch_size,
        evaluation_batch_size=measurement.evaluation_batch_size,
        points=tuple(points[key] for key in sorted(points)),
    )
