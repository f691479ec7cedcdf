"""Which configuration's losses the others are compared with: the baseline's, or those of a more precise form of it."""

from __future__ import annotations

from service.contract.measurement import Measurement
from service.levers import LEVERS, chosen


def precise(measurement: Measurement) -> bool:
    """Whether a measurement was computed in fp32 throughout, so that only other trials' rounding makes them differ."""
    rounded = any(choice.changes_numerics for choice in chosen(measurement.configuration.levers))
    return not rounded and measurement.weights_dtype in (None, "float32")


def reference_of(measured: Measurement) -> Measurement | None:
    """The baseline with fp32 master weights, whose losses others are compared with; None where it has them already.

    Where the baseline's weights are a checkpoint's 16 bits throughout, its own losses drift (pure bf16: by 3.6e-2 in 40
    steps), so that more precise configurations would look wrong. Adapters are always trained in fp32.
    """
    configuration = measured.configuration
    if configuration.method != "full" or measured.weights_dtype in (None, "float32"):
        return None
    levers = configuration.levers | {name: lever.reference for name, lever in LEVERS.items() if lever.reference}
    # Half the micro batch leaves room for weights of four bytes where two were measured.
    micro = max(1, (measured.micro_batch_size or 2) // 2)
    changed = configuration.model_copy(update={"levers": levers, "micro_batch_size": micro})
    return measured.model_copy(update={"configuration": changed, "micro_batch_size": micro})
