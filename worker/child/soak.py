"""The soak: hundreds of real steps of what is to be recommended, with all that makes a run fail hours later.

The longest samples first, real data in random order, the shortest in between, an evaluation and a save in the
middle and the longest again after them; memory is watched to the end. Interrupted, it goes on where it was.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from service.contract.child import Workplace
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Soak
from service.exports.templates.segments import moved
from worker.child import arrange, loop
from worker.child.block import ready
from worker.child.build import Bundle, evaluating
from worker.child.curve import plan_of
from worker.child.problem import Unsafe, Unstable
from worker.devices import Device

STEPS = {"quick": 8, "full": 200}
MOST_EVALUATED = {"quick": 64, "full": 1024}
LEAST_FOR_GROWTH = 30
NOISE_BYTES = 4 << 20
SAVE_EVERY = 20


@dataclass
class Evaluation:
    """What an evaluation found, and what it took."""

    loss: float
    accuracy: float | None
    seconds: float
    scores: dict[str, float] = field(default_factory=dict)
    generating: float | None = None


@dataclass
class State:
    """How far a soak has come; kept in the job's cache, so that an interrupted one goes on."""

    done: int = 0
    segments: int = 0
    worst_case_steps: int = 0
    retries: int = 0
    peak: int = 0
    evaluation: Evaluation | None = None
    saved: int = 0
    live: list[int] = field(default_factory=list)
    last_loss: float | None = None

    @classmethod
    def load(cls, file: Path | None) -> State:
        """What is on disk; what memory held in an ended process says nothing about this one."""
        if file is None or not file.exists():
            return cls()
        state = cls(**json.loads(file.read_text()))
        state.live = []
        if state.evaluation is not None:
            state.evaluation = Evaluation(**state.evaluation)  # type: ignore[arg-type]
        return state

    def save(self, file: Path | None) -> None:
        """Write it, all or nothing."""
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(asdict(self)))
            partial.rename(file)


def soak_plan(bundle: Bundle, micro: int, steps: int, seed: int) -> tuple[list[arrange.Step], int]:
    """(the optimizer steps, where in them the evaluation and the save come)."""
    lengths, effective = bundle.data.lengths, bundle.configuration.effective_batch_size
    by_length = sorted(range(len(lengths)), key=lambda one: (-lengths[one], one))
    # Two micro batches are as bad as a whole step: the second one runs with the gradients of the first in place.
    longest = [plan_of(bundle, by_length[:effective], micro)[0][:2]]
    shortest = [plan_of(bundle, by_length[-effective:], micro)[0][:2]]
    rng = random.Random(seed)
    ordinary: list[int] = []
    while len(ordinary) < steps * effective:
        ordinary += rng.sample(range(len(lengths)), len(lengths))
    plan = plan_of(bundle, ordinary[: max(0, steps - 3) * effective], micro)
    middle = len(plan) // 2
    before = longest + plan[:middle] + shortest
    return (before + longest + plan[middle:])[:steps], min(len(before), steps - 1)


def run_soak(
    spec: JobSpec, candidate: Measurement, seed: int, device: Device, workplace: Workplace, seconds: float
) -> Soak:
    """Soak a candidate for its steps or `seconds`, whichever is less. Unsafe, Unstable and out of memory pass."""
    bundle, micro = ready(spec, candidate, seed, device, workplace)
    steps = spec.search.soak_steps or STEPS[spec.search.verify]
    name = f"soak-{candidate.configuration.key}-{micro}-{steps}.json"
    file = workplace.job_cache / name if workplace.job_cache else None
    return soak(bundle, micro, steps, seed, candidate.evaluation_batch_size or micro, seconds, file)


def soak(
    bundle: Bundle, micro: int, steps: int, seed: int, evaluation_size: int, seconds: float, file: Path | None = None
) -> Soak:
    """The steps themselves."""
    state, started, device = State.load(file), time.perf_counter(), bundle.device
    state.segments += 1
    plan, middle = soak_plan(bundle, micro, steps, seed)
    first, rising = state.done, 0
    loaded = loop.loaded(bundle, plan[first:])
    for number in range(first, len(plan)):
        if number > first and state.evaluation and time.perf_counter() - started > seconds:
            break
        if state.evaluation is None and (number >= middle or time.perf_counter() - started > seconds / 2):
            state.evaluation = evaluate(bundle, evaluation_size)
            state.saved = save(bundle)
        before = device.retries()
        _step(bundle, next(loaded), number, state)
        rising = rising + 1 if device.retries() > before else 0
        state.retries += device.retries() - before
        if rising >= 2:
            raise Unsafe(f"the allocator had to free its cache on two steps running (step {number})")
        check_growth(state.live)
        if state.done % SAVE_EVERY == 0:
            state.save(file)
    loaded.close()
    state.save(file)
    seen = state.evaluation or evaluate(bundle, evaluation_size)
    return Soak(
        micro_batch_size=micro,
        steps=state.done,
        wanted_steps=steps,
        segments=state.segments,
        worst_case_steps=min(state.done, 1) + (state.done > middle),
        evaluation_loss=seen.loss,
        evaluation_accuracy=seen.accuracy,
        evaluation_scores=seen.scores,
        evaluation_rows=min(len(bundle.data.validation), MOST_EVALUATED[bundle.spec.search.verify]),
        evaluation_seconds=seen.seconds,
        generation_seconds=seen.generating,
        saved_bytes=state.saved,
        peak_bytes=state.peak,
        retries=state.retries,
        growth_bytes=_thirds(state.live)[2] - _thirds(state.live)[0] if len(state.live) >= LEAST_FOR_GROWTH else None,
        last_loss=state.last_loss,
    )


def _step(bundle: Bundle, step: loop.Loaded, number: int, state: State) -> None:
    batches, items, _ = step
    bundle.device.reset_peak()
    loss, norm = loop.optimizer_step(bundle, batches, items)
    bundle.device.synchronize()
    result = loop.StepResult(float(loss), float(norm))
    loop.check(bundle, result, number)
    state.done, state.last_loss = number + 1, result.loss
    state.peak = max(state.peak, bundle.device.peak())
    state.live.append(bundle.device.live())


def _thirds(live: list[int]) -> tuple[float, float, float]:
    third = len(live) // 3
    return (
        statistics.median(live[:third]),
        statistics.median(live[third : 2 * third]),
        statistics.median(live[2 * third :]),
    )


def check_growth(live: list[int]) -> None:
    """Unsafe when what is held between steps keeps growing: from third to third, and not levelling off."""
    if len(live) < LEAST_FOR_GROWTH or len(live) % 10:
        return
    first, second, last = _thirds(live)
    if second - first > NOISE_BYTES and last - second > max(NOISE_BYTES, 0.5 * (second - first)):
        pace = (last - first) / (len(live) * 2 / 3) / 2**20
        raise Unsafe(f"memory held between steps keeps growing, by {pace:.2f} MiB a step over {len(live)} steps")


@torch.no_grad()  # type: ignore[untyped-decorator]
def evaluate(bundle: Bundle, size: int) -> Evaluation:
    """Over validation samples, padded, dropout off, as the evaluation lever says. Unstable for a loss not finite."""
    started = time.perf_counter()
    bundle.model.eval()
    scores, generating = {}, None
    with evaluating(bundle) as score, bundle.autocast():
        loss, accuracy = _losses(bundle, size)
        if score:
            began = time.perf_counter()
            scores = score(bundle.data.validation, size, bundle.spec.dataset.max_length, bundle.tokenizer)
            generating = time.perf_counter() - began
    bundle.model.train()
    if not math.isfinite(loss):
        raise Unstable(f"the evaluation loss is {loss}")
    return Evaluation(loss, accuracy, time.perf_counter() - started, scores, generating)


def _losses(bundle: Bundle, size: int) -> tuple[float, float | None]:
    """(mean loss, share right)."""
    samples = sorted(
        bundle.data.validation[: MOST_EVALUATED[bundle.spec.search.verify]],
        key=lambda sample: len(sample[0]),
        reverse=True,
    )
    total = items = right = counted = 0.0
    for start in range(0, len(samples), size):
        rows = [[sample] for sample in samples[start : start + size]]
        count = sum(bundle.task.items(row[0]) for row in rows)
        width = bundle.width(max(len(ids) for ((ids, _),) in rows))
        batch = moved(loop.tensors(bundle, rows, mask=True, packed=False, width=width), bundle.device.torch)
        output: Any = bundle.model(**batch)
        total += float(output.loss) * count
        items += count
        hits, of = bundle.task.correct(output, batch)
        right, counted = right + hits, counted + of
    return total / max(1.0, items), right / counted if counted else None


def save(bundle: Bundle) -> int:
    """Save adapter or model as a run would, to a folder that is dropped; its bytes."""
    with tempfile.TemporaryDirectory(prefix="dynotune-save-") as folder:
        bundle.model.save_pretrained(folder)
        return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
