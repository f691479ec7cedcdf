"""The child's side of verification: one candidate's block under another seed, and the winner's soak."""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from service.contract.job import JobSpec
from service.contract.measurement import Block, Measurement, Outcome, Soak
from worker.devices import Device
from worker.trial import loop, probe
from worker.trial.build import Bundle, Limits, build
from worker.trial.curve import plan_of
from worker.trial.data import work_unit
from worker.trial.measure import unit_size
from worker.trial.problem import Unstable
from worker.trial.timing import Unit, time_unit

MOST_EVALUATED = {"quick": 64, "full": 1024}


def run_block(spec: JobSpec, candidate: Measurement, block: int, seed: int, device: Device, limits: Limits) -> Block:
    """Train the unit once under another seed; losses and timing. Unstable passes through."""
    bundle, micro = _ready(spec, candidate, seed, device, limits)
    samples = work_unit(bundle.data.lengths, unit_size(spec, bundle.data.facts), seed)
    unit = Unit(bundle, micro, plan_of(bundle, samples, micro))
    with loop.without_dropout(bundle.model) as dropout:
        pass  # only asked: what is timed has it, as the user's run will
    time_unit(unit, passes=1, extra=1)
    steps = len(unit.plan)
    return Block(
        key=candidate.configuration.key,
        block=block,
        seed=seed,
        outcome=Outcome.ok,
        dropout=dropout,
        timing=unit.timing(),
        losses=tuple(unit.losses[:steps]),
        grad_norms=tuple(unit.grad_norms[:steps]),
    )


def run_soak(spec: JobSpec, candidate: Measurement, seed: int, device: Device, limits: Limits, seconds: float) -> Soak:
    """The worst case, real steps, an evaluation, a save, the worst case again, real steps: what a run does."""
    bundle, micro = _ready(spec, candidate, seed, device, limits)
    deadline = time.perf_counter() + seconds
    most = 4 if spec.search.verify == "quick" else 200
    size = candidate.configuration.effective_batch_size * most
    plan = plan_of(bundle, work_unit(bundle.data.lengths, size, seed + 1), micro)
    steps = 0
    evaluated: tuple[float, float | None, float] | None = None
    saved = last = None
    for number, step in enumerate(plan):
        if evaluated is None and (number >= len(plan) // 2 or time.perf_counter() > deadline - seconds / 2):
            evaluated = evaluate(bundle, candidate.evaluation_batch_size or micro)
            saved = save(bundle)
            probe.fits(bundle, micro)
        if steps and time.perf_counter() > deadline:
            break
        loss, norm = loop.optimizer_step(bundle, *loop.prepare(bundle, step))
        last = loop.StepResult(float(loss), float(norm))
        loop.check(bundle, last, number)
        steps += 1
    if evaluated is None:
        evaluated = evaluate(bundle, candidate.evaluation_batch_size or micro)
        saved = save(bundle)
    return Soak(
        steps=steps,
        worst_case_steps=2,
        evaluation_loss=evaluated[0],
        evaluation_accuracy=evaluated[1],
        evaluation_seconds=evaluated[2],
        saved_bytes=saved,
        peak_bytes=device.peak(),
        last_loss=last.loss if last else None,
    )


def _ready(spec: JobSpec, candidate: Measurement, seed: int, device: Device, limits: Limits) -> tuple[Bundle, int]:
    """The candidate built under a seed, compiled if it is."""
    assert candidate.micro_batch_size is not None
    bundle = build(spec, candidate.configuration, device, limits, seed)
    if bundle.compiled():
        bundle.compile()
    # Neither compiling nor cold caches nor making the optimizer's state is timed: all sizes of batch run first.
    probe.fits(bundle, candidate.micro_batch_size)
    if bundle.compiled() or bundle.device.torch.type == "cuda":
        probe.fits(bundle, 1)
    loop.forget(bundle)
    return bundle, candidate.micro_batch_size


@torch.no_grad()  # type: ignore[untyped-decorator]
def evaluate(bundle: Bundle, size: int) -> tuple[float, float | None, float]:
    """(mean loss, share right, seconds) over validation samples, padded, dropout off."""
    started = time.perf_counter()
    bundle.model.eval()
    samples = sorted(
        bundle.data.validation[: MOST_EVALUATED[bundle.spec.search.verify]],
        key=lambda sample: len(sample[0]),
        reverse=True,
    )
    total = items = right = counted = 0.0
    for start in range(0, len(samples), size):
        rows = [[sample] for sample in samples[start : start + size]]
        count = sum(bundle.task.items(row[0]) for row in rows)
        batch = {
            name: value.to(bundle.device.torch) for name, value in bundle.task.collate(rows, bundle.pad, True).items()
        }
        with bundle.autocast():
            output: Any = bundle.model(**batch)
        total += float(output.loss) * count
        items += count
        hits, of = bundle.task.correct(output, batch)
        right, counted = right + hits, counted + of
    bundle.model.train()
    loss = total / max(1.0, items)
    if not math.isfinite(loss):
        raise Unstable(f"the evaluation loss is {loss}")
    return loss, right / counted if counted else None, time.perf_counter() - started


def save(bundle: Bundle) -> int:
    """Save adapter or model as a run would, to a folder that is dropped; its bytes."""
    with tempfile.TemporaryDirectory(prefix="dynotune-save-") as folder:
        bundle.model.save_pretrained(folder)
        return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
