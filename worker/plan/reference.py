"""What other configurations' numbers are compared with: the baseline, or a more precise form of it."""

from __future__ import annotations

from service.contract.measurement import Measurement
from service.levers import LEVERS, chosen


def precise(measurement: Measurement) -> bool:
    """Whether a measurement was computed in fp32, so that others must agree with its numbers but for rounding."""
    rounded = any(choice.changes_numerics for choice in chosen(measurement.configuration.levers))
    return not rounded and measurement.weights_dtype in (None, "float32")


def reference_of(measured: Measurement) -> Measurement | None:
    """The baseline with fp32 master weights, with whose losses others are compared; None where it has them already.

    Trained in a checkpoint's 16 bits throughout, the baseline itself drifts (pure bf16: 3.6e-2 in 40 steps), and
    better configurations would be the ones to look wrong. Adapters are kept in fp32 in any case.
    """
    configuration = measured.configuration
    if configuration.method != "full" or measured.weights_dtype in (None, "float32"):
        return None
    levers = configuration.levers | {name: lever.reference for name, lever in LEVERS.items() if lever.reference}
    # Half the micro batch: four bytes a weight have to fit where two did.
    micro = max(1, (measured.micro_batch_size or 2) // 2)
    changed = configuration.model_copy(update={"levers": levers, "micro_batch_size": micro})
    return measured.model_copy(update={"configuration": changed, "micro_batch_size": micro})
