"""How good an answer the whole loop of plan, trial and verification has in the minutes of a job, in virtual time.

    python -m benchmarks.simulated_gpu [--job NAME ...] [--seeds N] [--json FILE]

The jobs are surfaces with the physics of real models and GPUs (benchmarks/surfaces), so that the best of all valid
configurations is known. A trial takes the virtual seconds of its start, its load, its compile and its steps; so does
each process of a verification. Nothing is computed: a job takes some seconds. Wanted is an answer within 5% of the
best, verified within the job's minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.surfaces.analytic import START, Analytic
from benchmarks.surfaces.lengths import Lengths
from benchmarks.surfaces.mechanistic import surface
from benchmarks.surfaces.policies import searched
from benchmarks.surfaces.workers import H200, RTX_4090
from service.contract.hardware import HardwareFacts
from service.contract.measurement import Measurement
from service.contract.task import LEAST_SOAK_SECONDS, PlanInput, VerifyRequest, block_passes, keeps_process
from worker.child.measure import unit_size
from worker.child.soak import SOAK_STEPS
from worker.plan.budget import warm_seconds
from worker.plan.proof import PROOF_STEPS
from worker.runner.together import fit_together

REPLAYS = 4  # of a proof: the candidate's, the reference's, and two that tell the job's own noise
BLOCKS = 2  # on a quiet GPU two settle which is faster
GPUS = {"24gib": (RTX_4090, "4090"), "139gib": (H200, "h200")}
# Name -> (task, method, model, the lengths of its rows, minutes, what else the job says of training).
LONG = Lengths(700, 0.8, 4096, 20_000)
JOBS: dict[str, tuple[str, Any, str, Lengths, float, dict[str, Any]]] = {
    "bert": ("sequence-classification", "full", "bert", Lengths(60, 0.7, 256, 20_000), 9, {}),
    "llama-1b-lora": ("causal-lm", "lora", "1b-lora", Lengths(350, 0.8, 2048, 20_000), 9, {}),
    "llama-8b-lora": ("causal-lm", "lora", "8b-lora", LONG, 20, {"effective_batch_size": 16}),
    "llama-8b-qlora": ("causal-lm", "qlora", "8b-lora", LONG, 20, {"effective_batch_size": 16}),
}
NAMES = [f"{job}-{gpu}" for job in JOBS for gpu in GPUS]


def build(name: str, seed: int, verify: str) -> Analytic:
    """The surface of a job, whose search has the job's minutes."""
    job, _, gpu = name.rpartition("-")
    task, method, model, lengths, minutes, training = JOBS[job]
    facts, device = GPUS[gpu]
    made = surface(name, device, model, facts, task, method, lengths, **training)
    search = {"trials": 1000, "minutes": minutes, "verify": verify, "seed": seed}
    made.spec = made.spec.model_copy(update={"search": made.spec.search.model_copy(update=search)})
    made.unit_samples, made.passes = unit_size(made.spec, made.dataset), 1 if verify == "quick" else 2
    return made


def process(one: Measurement) -> float:
    """Seconds until a process of a verification begins with its steps; what it compiles, the first one has compiled."""
    return START + one.load_seconds


def blocks(request: VerifyRequest, facts: HardwareFacts, minutes: float) -> float:
    """Seconds of the blocks: candidates that fit together take turns, others run one after another and back again.

    A process that is kept trains two blocks (docs/decisions/0028): of those that do not fit together only the last one.
    """
    everyone = [*([request.baseline] if request.baseline else []), *request.finalists]
    units = [one.timing.seconds for one in everyone if one.timing]
    passes, are_together = block_passes(max(units), minutes), fit_together(everyone, facts)
    seconds = 0.0
    for one, unit in zip(everyone, units, strict=True):
        kept = keeps_process(one) and (are_together or one is everyone[-1])
        seconds += (1 if kept else BLOCKS) * process(one)
        seconds += BLOCKS * (passes * unit + warm_seconds(one, unit, facts))
    return seconds


def verification(request: VerifyRequest, verify: str, facts: HardwareFacts, minutes: float) -> float:
    """Seconds of a verification: blocks of all candidates, the proof of the fastest, and its soak."""
    everyone = [*([request.baseline] if request.baseline else []), *request.finalists]
    best = request.finalists[0]
    step, slowest = best.step_seconds or 0.0, max(one.step_seconds or 0.0 for one in everyone)
    compiling = sum(one.compile_seconds for one in everyone)
    # The candidate's process, and the reference's for each of its replays, or one for all.
    processes = 2 if best.configuration.method != "full" else REPLAYS
    proof = processes * process(best) + PROOF_STEPS[verify] * (step + (REPLAYS - 1) * slowest) / 4
    soak = SOAK_STEPS[verify] * step
    needed = compiling + blocks(request, facts, minutes) + proof + process(best)
    # A soak ends with the job's time, but never before it has run for so long.
    return needed + max(LEAST_SOAK_SECONDS, min(soak, request.seconds_limit - needed))


def run(name: str, seed: int, verify: str) -> dict[str, Any]:
    """What a job's answer is worth, and what it took."""
    made, workers = build(name, seed, verify), time.perf_counter()
    known, decision = searched(PlanInput(spec=made.spec, facts=made.facts), made, seed)
    row: dict[str, Any] = {
        "job": name,
        "seed": seed,
        "trials": len(known.history),
        "minutes_given": made.spec.search.minutes,
    }
    row["search_minutes"] = known.elapsed_seconds / 60
    row["failed"] = sum(one.measurement.outcome != "ok" for one in known.history)
    if decision.verify is None:
        return row | {"regret": math.inf, "minutes": known.elapsed_seconds / 60}
    # Blocks tell finalists apart by their true speed.
    best = min(made.true_score(one.configuration) for one in decision.verify.finalists)
    seconds = known.elapsed_seconds + verification(decision.verify, verify, made.facts, made.spec.search.minutes)
    return row | {
        "regret": best / made.best - 1,
        "minutes": seconds / 60,
        "planning_seconds": time.perf_counter() - workers,
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--job", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--verify", choices=("quick", "standard"), default="quick")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'job':24} {'regret':>7} {'worst':>7} {'minutes':>8} {'given':>6} {'trials':>7} {'failed':>7}")
    for name in options.job:
        mine = [run(name, seed, options.verify) for seed in range(options.seeds)]
        rows += mine
        medians = {
            key: statistics.median(row[key] for row in mine) for key in ("regret", "minutes", "trials", "failed")
        }
        print(
            f"{name:24} {medians['regret']:7.1%} {max(row['regret'] for row in mine):7.1%} {medians['minutes']:8.1f} "
            f"{mine[0]['minutes_given']:6.0f} {medians['trials']:7.0f} {medians['failed']:7.0f}",
            flush=True,
        )
    if options.json:
        found = {"verify": options.verify, "date": time.strftime("%Y-%m-%d"), "rows": rows}
        options.json.write_text(json.dumps(found, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
