"""Part `by-hand`: single trials of the settings that others recommend, and of the methods beside one another.

What a search finds is to be at least as fast as what Unsloth and Axolotl have people set: packed rows by a kernel that
knows where samples end, Liger's kernels, a head without logits, and LoRA's projections in one function each. An 8B
model is timed by LoRA and by QLoRA, and a BERT in fp32 at the batch that fits and in bf16, compiled. The first and the
last step of Predibase's ladder are timed on the 1B model by QLoRA, without the evaluations that the ladder leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from benchmarks.acceptance.place import Part, Place, Step, against
from benchmarks.acceptance.tuning import EIGHT, ONE, SHORT, Job, trial
from benchmarks.published.tables import PREDIBASE
from benchmarks.store import Row
from service.contract.job import JobSpec, Method
from service.levers import LEVERS

KERNELS = {
    "precision": "bf16-mixed",
    "kernels": "liger",
    "head": "liger",
    "projections": "fused",
    "optimizer": "adamw-fused",
    "padding": "multiple-8",
}
PACKED = {"batching": "packed", "attention": "varlen"}
# All rows of the 8B model are whole, so that no kernel has to know where samples end. On Hopper, cuDNN's is about
# twice as fast as FlashAttention 2 (https://github.com/huggingface/transformers/pull/48163).
WHOLE = {"attention": "sdpa-cudnn"}
# Of Predibase's ladder, whose evaluations are no part of the training time.
FIRST, LAST = ({**row.levers, "evaluation": "loss"} for row in (PREDIBASE[0], PREDIBASE[-1]))
COMPILED = {"precision": "bf16-mixed", "batching": "grouped", "compile": "per-layer", "padding": "multiple-8"}


@dataclass(frozen=True)
class Case:
    """A job, a method, what is set by hand beside the baseline's choices, and the seconds that must be left."""

    name: str
    job: Job
    method: Method
    changed: dict[str, str]
    seconds: float
    micro: int | None = None


CASES = (
    Case("1b-defaults", ONE, "lora", {}, 50),
    Case("1b-kernels", ONE, "lora", KERNELS | PACKED, 30),
    Case("bert-fp32", SHORT, "full", {"precision": "fp32"}, 20, micro=256),
    Case("bert-compiled", SHORT, "full", COMPILED, 35),
    Case("ladder-first", ONE, "qlora", FIRST, 55, micro=1),
    Case("ladder-last", ONE, "qlora", LAST, 30),
    Case("8b-lora", EIGHT, "lora", KERNELS | WHOLE, 90),
    Case("8b-qlora", EIGHT, "qlora", KERNELS | WHOLE, 60),
)
# (what, numerator, denominator, what is wanted of the ratio)
RATIOS = (
    ("1b: kernels over Trainer's defaults", "1b-kernels", "1b-defaults", 4.0),
    ("bert: compiled bf16 over fp32 at the batch that fits", "bert-compiled", "bert-fp32", 8.0),
    ("1b by QLoRA: last step of Predibase's ladder over the first", "ladder-last", "ladder-first", 15.0),
    ("8b: QLoRA's speed over LoRA's", "8b-qlora", "8b-lora", 0.75),
)


def made(place: Place, case: Case) -> Row:
    """The case's trial, without what this machine lacks."""
    body = case.job.body(place)
    # A single trial needs none of the search's minutes, of which too few may be left for a job.
    spec = JobSpec.model_validate(body | {"baseline": "default", "search": body["search"] | {"minutes": 5.0}})
    plain = {name: lever.baseline for name, lever in LEVERS.items()}
    there = {
        name: choice
        for name, choice in case.changed.items()
        if LEVERS[name].choice(choice).missing(place.facts, asked=True) is None
    }
    row = trial(place, case.job, spec, case.method, plain | there, place.pick(case.micro, None))
    left_out = {name: choice for name, choice in case.changed.items() if row["levers"].get(name) != choice}
    return row | {"left_out": left_out}


def steps(place: Place) -> list[Step]:
    """One a case; in a dry run two of them, of an adapter and of a whole model."""
    cases = place.pick(CASES, [case for case in CASES if case.name in ("bert-fp32", "8b-lora")])
    return [Step(f"by-hand/{case.name}", case.seconds, partial(made, case=case)) for case in cases]


def show(place: Place, rows: dict[str, Row]) -> list[str]:
    """Tokens/s and MFU by case, then the ratios."""
    lines, speeds = [], {}
    for key, row in rows.items():
        if "tokens_per_second" not in row:
            continue
        name, speed = key.partition("/")[2], row["tokens_per_second"]
        speeds[name] = speed
        shares = [
            f"{speed * row['flops_a_token'] / peak:.0%} of the {kind} peak" for kind, peak in place.peak_flops().items()
        ]
        without = [f"without {choice}" for choice in row["left_out"].values()]
        told = [f"{name:13} {speed:>9,.0f} tokens/s", f"micro {row['micro_batch_size']}", *shares, *without]
        lines.append(", ".join(told))
    for what, above, below, wanted in RATIOS:
        if above in speeds and below in speeds:
            lines.append(against(speeds[above] / speeds[below], wanted, what))
    if "8b-lora" in speeds and EIGHT.tokens:
        lines.append(against(speeds["8b-lora"], EIGHT.tokens, "8b: LoRA's tokens/s"))
    return lines


PART = Part("by-hand", steps, show)
