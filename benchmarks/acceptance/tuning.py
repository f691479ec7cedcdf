"""Parts `tune-bert`, `tune-1b`, `tune-8b`: whole jobs by `dynotune tune`, from the job's file to its recommendation."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.acceptance.models import data, flops_a_token, model
from benchmarks.acceptance.place import Part, Place, Step, against
from benchmarks.store import Row
from service.contract.recommendation import Recommendation

MOST_MINUTES = 7.5
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
    speedup: float | None = None
    tokens: float | None = None
    baseline: Any = "default"

    def body(self, place: Place) -> dict[str, Any]:
        """What is submitted; a dry run's is over in seconds."""
        source, rows = model(place, self.model), data(place, self.data)  # made first: that takes of the time left
        minutes = min(MOST_MINUTES, (place.left() - OUTSIDE_SECONDS) / 60)
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
ONE = Job("1b", "llama-1b", "varying", "causal-lm", ("lora",), 2048, 32, speedup=8)
LONGER = tuple(replace(ONE, name=f"1b-again-{seed}", seed=seed) for seed in (1, 2))
EIGHT = Job("8b", "llama-8b", "long", "causal-lm", ("lora", "qlora"), 4096, 32, tokens=12_500)


def tuned(place: Place, job: Job) -> Row:
    """The job's answer in figures; its recommendation is kept beside the results."""
    folder = place.home / "tuned" / job.name
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "job.json"
    file.write_text(json.dumps(job.body(place)))
    place.python("-m", "service.cli", "tune", str(file), "--output", str(folder))
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
    }


def lines_of(place: Place, job: Job, row: Row) -> list[str]:
    """One job's answer, against what is wanted."""
    if "speedup" not in row:
        return []
    levers = " ".join(f"{name}={choice}" for name, choice in row["differs"].items())
    lines = [f"{job.name}: {row['tokens_per_second']:,.0f} tokens/s, micro {row['micro_batch_size']}, {levers}"]
    if job.speedup:
        lines.append(against(row["speedup"], job.speedup, f"{job.name}: speed-up over its baseline"))
    elif row["speedup"]:
        lines.append(f"{job.name}: speed-up over its baseline {row['speedup']:.2f}")
    if row["stable"] is not True:
        lines.append(f"{job.name}: NOT SEEN STABLE: {row['statement'][:100]}")
    for name, one in row["methods"].items():
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
        return [Step(f"{name}/{job.name}", 300, partial(tuned, job=job)) for job in place.pick(jobs, jobs[:1])]

    def show(place: Place, rows: dict[str, Row]) -> list[str]:
        found = {job.name: rows.get(f"{name}/{job.name}", {}) for job in jobs}
        lines = [line for job in jobs for line in lines_of(place, job, found[job.name])]
        speeds = [row["tokens_per_second"] for row in found.values() if "tokens_per_second" in row]
        if name == "tune-1b" and len(speeds) == len(jobs) > 1:
            lines.append(against(speeds[0] / max(speeds), 0.97, "1b: the first search against the best of all"))
        methods = found[jobs[0].name].get("methods", {})
        if {"lora", "qlora"} <= set(methods):
            share = methods["qlora"]["tokens_per_second"] / methods["lora"]["tokens_per_second"]
            lines.append(against(share, 0.75, f"{jobs[0].name}: QLoRA's speed over LoRA's"))
        return lines

    return Part(name, steps, show)


TUNE_BERT, TUNE_1B, TUNE_8B = part("tune-bert", BERT), part("tune-1b", (ONE, *LONGER)), part("tune-8b", (EIGHT,))
