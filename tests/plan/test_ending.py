"""What a job of which no trial may be recommended tells its user: what happened, and what would help."""

from __future__ import annotations

from service.contract.configuration import Configuration
from service.contract.measurement import Outcome, Probe
from service.contract.states import Origin
from service.contract.task import TrialRecord
from tests.factory import configuration, failed, measured, record
from worker.plan.ending import nothing_worked

GIB = 1 << 30
BASELINE = record(measured(configuration(micro=8)), Origin.baseline)


def ran_out(made: Configuration, *peaks: int | None, reason: str = "too large") -> TrialRecord:
    """A trial that ran out of memory, whose probe took so many bytes at micro batches of 1 and more."""
    probes = tuple(Probe(micro_batch_size=at, peak_bytes=peak) for at, peak in enumerate(peaks, 1))
    return record(failed(made, reason=reason, probes=probes))


def test_a_job_without_time_for_a_trial_is_told_to_take_more() -> None:
    assert nothing_worked(()) == "There was no time for a single trial; raise search.minutes."


def test_where_all_ran_out_of_memory_the_least_that_was_seen_is_told_with_what_took_it() -> None:
    """It tells how much memory is lacking. A baseline that ran without what is fixed was no answer, nor is it here."""
    least = configuration(checkpointing="full")
    tried = (
        ran_out(configuration(batching="sorted"), 5 * GIB, 7 * GIB, None),
        ran_out(least, 5 * GIB // 2, 3 * GIB, None),
        ran_out(configuration(batching="packed"), 3 * GIB, None),
    )
    said = nothing_worked((BASELINE, *tried))
    assert said.startswith("Every configuration ran out of memory; the smallest peak seen was 2.50 GiB ")
    assert f"({least.title()})" in said and "dataset.max_length, method qlora" in said


def test_where_no_step_ran_the_first_reason_is_told() -> None:
    """It is that of the baseline, or of what is nearest to it."""
    tried = [ran_out(configuration(batching=one), None, reason=f"{one} took 9 GiB") for one in ("sorted", "packed")]
    said = nothing_worked(tuple(tried))
    assert "not even a micro batch of 1 ran through a step (sorted took 9 GiB)" in said


def test_where_trials_failed_in_several_ways_each_is_told_once_and_at_most_three() -> None:
    """One that did not run out of memory is enough: less memory would not have helped it."""
    tried = [
        failed(configuration(batching="sorted"), reason="too large."),
        failed(configuration(batching="packed"), Outcome.crashed, "it broke."),
        failed(configuration(batching="grouped"), Outcome.crashed, "it broke"),
        failed(configuration(attention="eager"), Outcome.unstable, "nan"),
        failed(configuration(head="chunked"), Outcome.timed_out, "it hung"),
    ]
    said = nothing_worked((BASELINE, *map(record, tried)))
    assert said == "No configuration ran to its end. infeasible: too large; crashed: it broke; unstable: nan."
