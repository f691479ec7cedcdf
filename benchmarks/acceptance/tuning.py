"""Parts `tune-bert`, `tune-1b`, `tune-8b`: whole jobs by `dynotune tune`, from the job's file to its recommendation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.acceptance.models import data, flops_a_token, model
from benchmarks.acceptance.place import Failed, Late, Part, Place, Step, against
from benchmarks.finders.ours import Machine
from benchmarks.store import Row, say
from service.contract.job import JobSpec, Method
from service.contract.measurement import Outcome
from service.contract.recommendation import Recommendation
from service.contract.states import Origin
from service.contract.task import TrialRequest
from service.contract.views import ListedTrial, TrialList
from service.levers import LEVERS
from worker.plan.space import make, repaired
from worker.runner.measuring import measure
from worker.runner.sandbox import Sandbox

MOST_MINUTES, TIMED_SECONDS = 7.5, 80
LAST_SECONDS = 25.0  # of a call, in which a job that is interrupted writes the best so far
OUTSIDE_SECONDS = 60  # starting, ending and a first tokenising are not in a job's minutes


@dataclass(frozen=True)
class Job:
    """One job, and the speed-up and tokens/s that are wanted of it."""

    name: str
    model: str
    data: str
    task: str
    methods: tuple[str, ...]
    length: int
    effective: int
    seed: int = 0
    timed: tuple[Method, ...] = ()  # methods that are timed once, with what the search has found
    least: float = 210.0  # seconds that a search needs to be worth beginning, its model drawn and all
    speedup: float | None = None
    tokens: float | None = None
    baseline: Any = "default"

    def body(self, place: Place) -> dict[str, Any]:
        """What is submitted; a dry run's is over in seconds."""
        source, rows = model(place, self.model), data(place, self.data)  # made first: that takes of the time left
        outside = OUTSIDE_SECONDS + LAST_SECONDS + TIMED_SECONDS * len(self.timed)
        minutes = min(MOST_MINUTES, (place.left() - outside) / 60)
        return {
            "name": self.name,
            "model": {
                "source": str(source),
                "weights": "pretrained" if "llama" in self.model else "random",
            },
            "dataset": {"source": str(rows), "max_length": place.pick(self.length, 64)},
            "task": self.task,
            "method": self.methods if not place.dry else self.methods[:1],
            "training": {"effective_batch_size": place.pick(self.effective, 8), "learning_rate": 1e-4, "epochs": 1},
            "search": {
                "minutes": place.pick(minutes, 0.2),
                "trials": place.pick(200, 2),
                "seed": self.seed,
                "verify": "quick",
                **place.pick({}, {"soak_steps": 3}),
            },
            "hardware": {"device": place.device} | place.pick({}, {"memory_gib": 3}),
            "baseline": self.baseline,
        }


CLASSIFY = "sequence-classification"
# fp32 at a batch that fits, as the published ladder begins.
FP32 = {"per_device_train_batch_size": 256, "optim": "adamw_torch"}
SHORT = Job("short", "bert-base", "short", CLASSIFY, ("full",), 128, 256, baseline=FP32, speedup=8)
BERT = (
    SHORT,
    replace(SHORT, name="short-plain", model="bert-base-no-attention-dropout"),
    replace(SHORT, name="imdb", data="reviews", length=256, speedup=None),
)
ONE = Job("1b", "llama-1b", "varying", "causal-lm", ("lora",), 2048, 32, speedup=4)
LONGER = tuple(replace(ONE, name=f"1b-again-{seed}", seed=seed) for seed in (1, 2))
EIGHT = Job("8b", "llama-8b", "long", "causal-lm", ("lora",), 4096, 32, timed=("qlora",), least=330.0, tokens=12_500)


def tuned(place: Place, job: Job) -> Row:
    """The job's answer in figures; its recommendation and its trials are kept beside the results.

    A job that had to be interrupted gives its best so far, and says so. Failed where it has none, with all its trials.
    """
    folder = place.home / "tuned" / job.name
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("recommendation.json", "trials.json"):
        (folder / name).unlink(missing_ok=True)
    file = folder / "job.json"
    file.write_text(json.dumps(job.body(place)))
    late = None
    try:
        place.python("-m", "service.cli", "tune", str(file), "--output", str(folder), to_end=LAST_SECONDS)
    except Late as error:
        late = str(error)
        if not (folder / "recommendation.json").exists():
            raise
    trials = TrialList.model_validate_json((folder / "trials.json").read_text()).items
    best = Recommendation.model_validate_json((folder / "recommendation.json").read_text())
    found = {
        name: {
            "tokens_per_second": one.evidence.tokens_per_second,
            "levers": one.configuration.levers,
            "micro_batch_size": one.configuration.micro_batch_size,
            "flops_a_token": flops_a_token(place, job.model, name, job.task, one.evidence.measurement),
            "stable": one.stability.stable,
        }
        for name, one in (best.methods or {best.configuration.method: best}).items()
    }
    evidence, baseline = best.evidence, best.evidence.baseline
    return {
        "method": best.configuration.method,
        "tokens_per_second": evidence.tokens_per_second,
        "baseline_tokens_per_second": baseline.tokens_per_second if baseline else None,
        "speedup": evidence.speedup,
        "speedup_low": evidence.speedup_low,
        "speedup_high": evidence.speedup_high,
        "stable": best.stability.stable,
        "statement": best.stability.statement,
        "methods": found,
        "differs": {
            name: choice
            for name, choice in best.configuration.levers.items()
            if baseline and baseline.configuration.levers.get(name) != choice
        },
        "micro_batch_size": best.configuration.micro_batch_size,
        "rejected": len(best.rejected),
        "trials": [told(one, trials[0]) for one in trials],
        **({"cut_off": late} if late else {}),
    }


def told(trial: ListedTrial, baseline: ListedTrial) -> Row:
    """A trial in figures: how it differs from the baseline, how it ended, its speed, and what its seconds went into."""
    base, measured = baseline.configuration.levers, trial.measurement
    return {
        "origin": trial.origin,
        "differs": {name: choice for name, choice in trial.configuration.levers.items() if base[name] != choice},
        "outcome": trial.outcome,
        **({"reason": measured.reason} if measured and measured.reason else {}),
        "tokens_per_second": measured and measured.tokens_per_second,
        "micro_batch_size": measured and measured.micro_batch_size,
        "peak_bytes": measured and measured.peak_bytes,
        "time_spent": measured and measured.time_spent,
    }


def timed(place: Place, job: Job, method: Method) -> Row:
    """One trial of another method, with the levers that the job's search has found where they go with it."""
    found = place.home / "tuned" / job.name / "recommendation.json"
    if not found.exists():
        raise Failed(f"the job {job.name} has no recommendation yet")
    best = Recommendation.model_validate_json(found.read_text())
    return trial(place, job, JobSpec.model_validate(best.spec), method, best.configuration.levers)


def trial(
    place: Place, job: Job, spec: JobSpec, method: Method, wanted: Mapping[str, str], micro: int | None = None
) -> Row:
    """One trial of these choices where they go with the method and one another, at the micro batch if one is given."""
    choices = {name: tuple(choice.name for choice in lever.choices) for name, lever in LEVERS.items()}
    levers = repaired(spec, method, dict(wanted), choices)
    made = make(spec, method, levers, spec.training.effective_batch_size or place.pick(job.effective, 8))
    if made is None:
        raise Failed(f"{method} does not go with {levers}")
    if micro is not None:
        made = made.model_copy(update={"micro_batch_size": micro})
    bench = Machine(place.facts, place.home, place.left()).bench(
        Sandbox(place.facts.has_own_memory, capability=place.facts.capability)
    )
    request = TrialRequest(configuration=made, origin=Origin.recipe, number=1, seconds_limit=max(1.0, place.left()))
    measured, log = measure(bench, spec, f"{job.name}-{method}", request, say, lambda: False, None)
    if measured is None or measured.outcome is not Outcome.ok:
        raise Failed(measured.reason if measured else log)
    return {
        "method": method,
        "tokens_per_second": measured.tokens_per_second,
        "levers": levers,
        "micro_batch_size": measured.micro_batch_size,
        "peak_bytes": measured.peak_bytes,
        "time_spent": measured.time_spent,
        "flops_a_token": flops_a_token(place, job.model, method, job.task, measured),
    }


def lines_of(place: Place, job: Job, row: Row, others: Mapping[Method, Row]) -> list[str]:
    """One job's answer, against what is wanted, and the speed of the `others` by method."""
    if "speedup" not in row:
        return []
    levers = " ".join(f"{name}={choice}" for name, choice in row["differs"].items()) or "as the baseline"
    lines = [f"{job.name}: {row['tokens_per_second']:,.0f} tokens/s, micro {row['micro_batch_size']}, {levers}"]
    if job.speedup:
        lines.append(against(row["speedup"], job.speedup, f"{job.name}: speed-up over its baseline"))
    elif row["speedup"]:
        lines.append(f"{job.name}: speed-up over its baseline {row['speedup']:.2f}")
    if "cut_off" in row:
        lines.append(f"{job.name}: {row['cut_off']}, so this is the best so far")
    if row["stable"] is not True:
        lines.append(f"{job.name}: NOT SEEN STABLE: {row['statement'][:100]}")
    for name, one in {**row["methods"], **others}.items():
        rate = one["tokens_per_second"] * one["flops_a_token"]
        shares = ", ".join(f"{rate / peak:.0%} of the {kind} peak" for kind, peak in place.peak_flops().items())
        mfu = f", MFU {shares}" if shares else ""
        lines.append(f"{job.name} {name}: {one['tokens_per_second']:,.0f} tokens/s{mfu}")
    if job.tokens:
        lines.append(against(row["methods"].get("lora", row)["tokens_per_second"], job.tokens, f"{job.name}: tokens/s"))
    return lines


def part(name: str, jobs: tuple[Job, ...]) -> Part:
    """A part of jobs; a dry run takes the first."""

    def steps(place: Place) -> list[Step]:
        made = []
        for job in place.pick(jobs, jobs[:1]):
            made.append(Step(f"{name}/{job.name}", job.least + TIMED_SECONDS * len(job.timed), partial(tuned, job=job)))
            for method in job.timed:
                again = partial(timed, job=job, method=method)
                made.append(Step(f"{name}/{job.name}-{method}", TIMED_SECONDS - 20, again))
        return made

    def show(place: Place, rows: dict[str, Row]) -> list[str]:
        found = {job.name: rows.get(f"{name}/{job.name}", {}) for job in jobs}
        others = {
            job.name: {
                method: row
                for method in job.timed
                if "tokens_per_second" in (row := rows.get(f"{name}/{job.name}-{method}", {}))
            }
            for job in jobs
        }
        lines = [line for job in jobs for line in lines_of(place, job, found[job.name], others[job.name])]
        speeds = [row["tokens_per_second"] for row in found.values() if "tokens_per_second" in row]
        if name == "tune-1b" and len(speeds) == len(jobs) > 1:
            lines.append(against(speeds[0] / max(speeds), 0.97, "1b: the first search against the best of all"))
        methods = found[jobs[0].name].get("methods", {}) | others[jobs[0].name]
        if {"lora", "qlora"} <= set(methods):
            share = methods["qlora"]["tokens_per_second"] / methods["lora"]["tokens_per_second"]
            lines.append(against(share, 0.75, f"{jobs[0].name}: QLoRA's speed over LoRA's"))
        return lines

    return Part(name, steps, show)


TUNE_BERT, TUNE_1B, TUNE_8B = part("tune-bert", BERT), part("tune-1b", (ONE, *LONGER)), part("tune-8b", (EIGHT,))
