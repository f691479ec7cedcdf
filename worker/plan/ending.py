"""The error of a job of which no trial succeeded."""

from __future__ import annotations

from service.contract.measurement import Outcome
from service.contract.task import TrialRecord


def nothing_worked(history: tuple[TrialRecord, ...]) -> str:
    """The sentence for a job without a trial that may be recommended: what happened, and what would help."""
    if not history:
        return "There was no time for a single trial; raise search.minutes."
    measurements = [record.measurement for record in history if record.measurement.outcome is not Outcome.ok]
    if not measurements:
        more = "search.trials or search.minutes"
        return f"Only the baseline ran, which does not have what search.fixed asks for; raise {more}."
    if any(one.outcome is not Outcome.infeasible for one in measurements):
        reasons = list(dict.fromkeys(f"{one.outcome}: {one.reason.rstrip('.')}" for one in measurements))
        return "No configuration ran to its end. " + "; ".join(reasons[:3]) + "."
    peaks = [
        (probe.peak_bytes, one.configuration)
        for one in measurements
        for probe in one.probes
        if probe.peak_bytes is not None
    ]
    if peaks:
        least, configuration = min(peaks, key=lambda peak: peak[0])
        seen = f"the smallest peak seen was {least / 2**30:.2f} GiB ({configuration.title()})"
    else:
        seen = f"not even a micro batch of 1 ran through a step ({measurements[0].reason})"
    return (
        f"Every configuration ran out of memory; {seen}. A smaller dataset.max_length, method qlora, a smaller model "
        "or more memory would help."
    )
