"""What the estimator says before anything runs, beside what the probe measured."""

from __future__ import annotations

import statistics

from benchmarks.finders.cases import Case
from benchmarks.finders.messages import Answer
from benchmarks.finders.ours import Machine
from benchmarks.store import Row
from service.contract.estimate import EstimateRequest
from service.contract.task import EstimateClaim
from worker.runner.estimating import answer
from worker.runner.measuring import JobFailed
from worker.runner.sandbox import Sandbox


def estimated(machine: Machine, case: Case, measured: Row, true: int) -> Row:
    """One case's estimate against its measured peaks; RuntimeError when a child fails.

    Both sides are compared without what an idle process takes: the estimate without its overhead, the measurement
    without what a child still holds that has built the model and dropped it.
    """
    configuration = case.configuration()
    spec = case.spec(machine.home)
    search = spec.search.model_copy(update={"fixed": configuration.levers})
    request = EstimateRequest(
        spec=spec.model_copy(update={"search": search}), memory_gib=case.gib or machine.facts.memory_bytes / 2**30
    )
    claim = EstimateClaim(task_id=case.cache, attempt=1, request=request)
    try:
        found = answer(
            machine.bench(Sandbox(case.device != "cpu", capability=machine.facts.capability)),
            claim,
            lambda _: None,
            lambda: False,
        )
    except JobFailed as error:
        raise RuntimeError(f"{case.name}: {error}") from error
    assert found is not None, "nobody ends it from outside"
    idle = machine.child(case, "idle")
    if not isinstance(idle.last, Answer):
        raise RuntimeError(f"{case.name}: {idle.kind}: {idle.reason}")
    rest = idle.last.figures["bytes"]
    method = found.methods[case.method]
    overhead = method.overhead_gib * 2**30
    peaks = {size: peak for size, peak in zip(measured["sizes"], measured["peaks"], strict=True) if peak is not None}
    errors = {size: (method.line.at(size) - overhead) / (peak - rest) - 1 for size, peak in peaks.items()}
    return {
        "case": case.name,
        "seconds": found.seconds,
        "idle_bytes": rest,
        "overhead_bytes": round(overhead),
        "errors": {str(size): error for size, error in errors.items()},
        "error": errors[max(errors)],
        "predicted": method.largest_micro_batch,
        "true": true,
    }


def table(rows: list[Row]) -> None:
    """Print the rows and how far off they are."""
    print(f"{'case':34} {'peak off by':>11} {'predicted':>9} {'true':>5} {'off by':>7} {'idle MiB':>8} {'assumed':>8}")
    for row in rows:
        print(
            f"{row['case']:34} {row['error']:+11.1%} {row['predicted']:9} {row['true']:5} {away(row):+7.1%} "
            f"{row['idle_bytes'] / 2**20:8.0f} {row['overhead_bytes'] / 2**20:8.0f}"
        )
    peaks = [abs(row["error"]) for row in rows]
    sizes = [abs(away(row)) for row in rows]
    print(f"peak: median {statistics.median(peaks):.1%} off, worst {max(peaks):.1%} (8% and 20% wanted)")
    print(f"largest batch: median {statistics.median(sizes):.1%} off, worst {max(sizes):.1%} (median 10% wanted)")


def away(row: Row) -> float:
    """The predicted largest batch against the true one."""
    return float(row["predicted"]) / max(1, int(row["true"])) - 1
