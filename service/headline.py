"""What the answer is best at, in the unit of the job's objective, and in a sentence. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from service.contract.job import JobSpec
from service.contract.measurement import Verdict
from service.contract.objective import is_too_slow, minimises_memory, proven_peak
from service.contract.recommendation import Evidence, ObjectiveFigure
from service.levers import as_fixed
from service.text import money

GIB = 2**30


def figure(spec: JobSpec, evidence: Evidence, verdicts: Sequence[Verdict] = ()) -> ObjectiveFigure:
    """The objective's figure of a configuration, and the baseline's, as far as `verdicts` tell more than its trial."""
    name, baseline = spec.search.objective, evidence.baseline
    ours: float | None
    theirs: float | None
    if name == "throughput":
        theirs = evidence.tokens_per_second / evidence.speedup if evidence.speedup else None
        unit, ours = "tokens/s", evidence.tokens_per_second
    elif name == "memory":
        unit, ours, theirs = "bytes", evidence.peak_bytes, None
        if baseline is not None:
            verdict = next((one for one in verdicts if one.key == baseline.configuration.key), None)
            theirs = proven_peak(baseline, verdict)
    elif name == "cost":
        unit, ours, theirs = "money", evidence.run_cost, evidence.baseline_run_cost
    else:
        unit, ours, theirs = "seconds", evidence.run_seconds, evidence.baseline_run_seconds
    return ObjectiveFigure(name=name, unit=unit, value=ours, baseline=theirs)


def sentence(spec: JobSpec, evidence: Evidence) -> str | None:
    """The figure in a sentence; None for seconds, which stand beside every answer, and where it is not known."""
    found = evidence.objective
    if found is None or found.value is None:
        return None
    if spec.search.objective == "cost":
        price = f"{spec.hardware.price_per_hour:g} an hour"
        usual = f", and {money(found.baseline)} with the baseline" if found.baseline is not None else ""
        return f"Objective cost: the whole run would cost {money(found.value)} at {price}{usual}."
    if not minimises_memory(spec):
        return None
    baseline = evidence.baseline
    usual = f", {found.baseline / GIB:.2f} GiB with the baseline" if found.baseline is not None else ""
    bound = "the least of what is not slower than the baseline"
    if found.baseline is None:
        bound = "no baseline ran to its end, so that nothing says how slow it may be"
    elif baseline and evidence.measurement.configuration == baseline.configuration:
        bound = "nothing that takes less was as fast as this, which is the baseline"
    elif is_too_slow(evidence.speedup):
        allowed = "stable" if baseline is None or as_fixed(spec, baseline.configuration) else "that search.fixed allows"
        bound = f"nothing {allowed} is as fast as the baseline, so this is the fastest"
    return f"Objective memory: it takes {found.value / GIB:.2f} GiB at most{usual}; {bound}."
