"""Hand-made measurements, blocks and plans for tests that need a history without measuring one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Block, DatasetFacts, Measurement, Outcome, Timing
from service.contract.replay import Replay
from service.contract.states import Origin
from service.contract.task import TrialRecord, TrialRequest
from service.levers import LEVERS

if TYPE_CHECKING:
    from sqlalchemy import Engine

DATASET = DatasetFacts(
    fingerprint="f" * 16,
    rows=1000,
    validation_rows=50,
    tokens=200_000,
    at_max_length=10,
    p50=150,
    p90=500,
    p99=512,
    longest=512,
    histogram={"256": 700, "512": 300},
    columns={"prompt": "prompt", "completion": "completion"},
    formats=(".jsonl",),
)


def configuration(method: str = "lora", effective: int = 32, micro: int | None = None, **levers: str) -> Configuration:
    """The baseline with some levers changed."""
    chosen = {name: lever.baseline for name, lever in LEVERS.items()} | levers
    return Configuration.model_validate(
        {
            "method": method,
            "levers": chosen,
            "effective_batch_size": effective,
            "learning_rate": 2e-4,
            "micro_batch_size": micro,
        }
    )


def timing(seconds: float, spread: float = 0.02, micro: int = 8) -> Timing:
    """A unit of 64 samples and 12,800 tokens in two steps."""
    return Timing(
        micro_batch_size=micro,
        seconds=seconds,
        low=seconds * (1 - spread),
        high=seconds * (1 + spread),
        samples=64,
        tokens=12_800,
        padded_tokens=20_000,
        steps=2,
        passes=2,
        clean_share=1.0,
        largest_share_of_others=0.0,
    )


def measured(made: Configuration, seconds: float = 10.0, **changes: Any) -> Measurement:
    """A good measurement."""
    values: dict[str, Any] = {
        "configuration": made,
        "outcome": Outcome.ok,
        "micro_batch_size": made.micro_batch_size or 8,
        "gradient_accumulation_steps": 4,
        "largest_micro_batch": 16,
        "timing": timing(seconds),
        "peak_bytes": 2 << 30,
        "capacity_bytes": 3 << 30,
        "evaluation_batch_size": 16,
        "load_seconds": 1.0,
        "check_loss": 9.0,
        "check_grad_norm": 1.0,
        "losses": (9.0, 8.9),
        "grad_norms": (1.0, 1.0),
        "dataset": DATASET,
        "time_spent": {"timing": seconds * 2},
    }
    return Measurement(**(values | changes))


def failed(
    made: Configuration, outcome: Outcome = Outcome.infeasible, reason: str = "too large", **values: Any
) -> Measurement:
    """A measurement that is no good."""
    return Measurement(configuration=made, outcome=outcome, reason=reason, **values)


def record(measurement: Measurement, origin: Origin = Origin.recipe, number: int = 1) -> TrialRecord:
    """A finished trial."""
    request = TrialRequest(configuration=measurement.configuration, origin=origin, number=number)
    return TrialRecord(request=request, measurement=measurement)


def block(
    measurement: Measurement,
    seconds: float,
    number: int = 0,
    outcome: Outcome = Outcome.ok,
    reason: str = "",
) -> Block:
    """A candidate's block."""
    return Block(
        key=measurement.configuration.key,
        block=number,
        seed=number + 1,
        outcome=outcome,
        reason=reason,
        timing=timing(seconds) if outcome is Outcome.ok else None,
    )


def replay(size: int = 4, **changes: Any) -> Replay:
    """Ten steps of so many samples each, of a model with two trained tensors."""
    values: dict[str, Any] = {
        "given": tuple(range(10 * size)),
        "steps": tuple(tuple(range(at, at + size)) for at in range(0, 10 * size, size)),
        "terms": (100,) * 10,
        "losses": tuple(9.0 - 0.01 * at for at in range(10)),
        "grad_norms": (1.0,) * 10,
        "applied_norms": (0.5,) * 10,
        "moved": {"first": 1e-3, "second": 2e-3},
        "shrunk": 0.02,
    }
    return Replay(**(values | changes))


def history(spec: JobSpec, *speeds: float) -> tuple[TrialRecord, ...]:
    """A baseline at 10 s and one recipe a speed, by batching."""
    found = [record(measured(configuration(micro=8), 10.0), Origin.baseline, 1)]
    for number, (seconds, batching) in enumerate(zip(speeds, ("sorted", "grouped", "packed"), strict=False), 2):
        made = configuration(batching=batching, precision="fp32")
        found.append(record(measured(made, seconds), Origin.recipe, number))
    return tuple(found)


def store_best(engine: Engine, job_id: str, *measurements: Measurement) -> None:
    """Store the best of measurements as a running job's recommendation so far, as the queue does with each result.

    What it needs is imported here: tests/stubs.py, which every stub's fork server imports, has no use for it."""
    from sqlalchemy.orm import Session

    from service import jobs
    from service.recommend import recommend

    with Session(engine) as session, session.begin():
        job = jobs.get(session, job_id)
        spec, facts = JobSpec.model_validate(job.spec), HardwareFacts.model_validate(job.facts)
        best = recommend(job_id, spec, facts, tuple(record(one) for one in measurements), {}, final=False)
        job.recommendation = best.model_dump(mode="json") if best else None
