"""The soak: hundreds of real steps of the configuration to be recommended, with all that makes a run fail hours later.

The longest samples come first, then data in random order, then the shortest samples, an evaluation and a save, the
longest samples again, and more data in random order. Memory is watched to the end. The state is saved on the way, so
that an interrupted soak goes on from there.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from service.contract.child import ChildMessage, RunSoak
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Soak
from service.contract.objective import minimises_memory
from service.contract.task import EVALUATED, LEAST_SOAK_SECONDS
from training import evaluation as training_evaluation
from training.batches import Prepared
from training.errors import TrainingError
from training.samples import Step
from worker.child import drift, probe
from worker.child import steps as optimizer_steps
from worker.child.arrange import plan_of, shape_of
from worker.child.build import Bundle, build
from worker.child.pieces import MOST_OTHERS
from worker.devices import Device

SOAK_STEPS = {"quick": 40, "standard": 200, "strict": 1000}  # where the job does not set search.soak_steps
MOST_STEPS = 5000  # of a soak whose steps the job does not give
# What a soak is judged by, beside the limits of worker/child/drift.py.
LEAST_FOR_FIFTHS = 40  # steps, before the losses of one fifth of them can be held against those of another
REPEATED_EARLY = 7  # steps after the first, which are trained again at the end to tell whether steps became slower
PAUSE_SECONDS = 30.0  # before they are trained a second time, where they were slower
LEAST_REPEATS, MOST_REPEATS = 12, 120  # of one step, to tell a leak from what libraries keep for each new shape
SAVE_EVERY = 20  # steps
LEFT_FREE = 1 << 30  # bytes of disk that a save leaves free


@dataclass
class Evaluation:
    """The scores of an evaluation, and the seconds that it took."""

    loss: float
    accuracy: float | None
    seconds: float
    scores: dict[str, float] = field(default_factory=dict)
    generating: float | None = None


@dataclass
class State:
    """How far a soak of `steps` steps has come; saved in a file, so that an interrupted soak goes on from there."""

    steps: int
    done: int = 0
    segments: int = 0
    retries: int = 0
    peak: int = 0
    evaluation: Evaluation | None = None
    saved: int = 0
    live: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @classmethod
    def load(cls, file: Path | None, steps: int) -> State:
        """Read the saved state, without the `live` memory of the steps so far: that was another process's."""
        if file is None or not file.exists():
            return cls(steps)
        known = {one.name for one in fields(cls)}  # an earlier version may have written others
        state = cls(**{name: value for name, value in json.loads(file.read_text()).items() if name in known})
        if state.steps != steps:
            return cls(steps)
        state.live = []
        if state.evaluation is not None:
            state.evaluation = Evaluation(**state.evaluation)  # type: ignore[arg-type]
        return state

    def save(self, file: Path | None) -> None:
        """Write the state to a temporary file and rename it, so that the file is always complete."""
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(asdict(self)))
            partial.rename(file)


def ready(asked: RunSoak, device: Device, tell: Callable[[ChildMessage], None]) -> tuple[Bundle, int]:
    """(the candidate, built and warmed up, and compiled where its configuration says so; its micro batch).

    The warm-up runs the largest shape and the smallest, so that the timing contains no compiling, no cold cache and
    no allocation of the optimizer's state.
    """
    candidate = asked.candidate
    assert candidate.micro_batch_size is not None
    bundle = build(asked.spec, candidate.configuration, device, asked.workplace, asked.seed, tell)
    if bundle.compiled:
        bundle.compile()
    probe.fits(bundle, candidate.micro_batch_size)
    if bundle.compiled or bundle.device.first_call_per_shape:
        probe.fits(bundle, 1)
    optimizer_steps.zero_optimizer_state(bundle)
    return bundle, candidate.micro_batch_size


def steps_of(spec: JobSpec, candidate: Measurement) -> int:
    """How many steps a soak has where the job does not say: enough for LEAST_SOAK_SECONDS at the candidate's pace."""
    enough = math.ceil(LEAST_SOAK_SECONDS / candidate.step_seconds) if candidate.step_seconds else 0
    return max(SOAK_STEPS[spec.search.verify], min(enough, MOST_STEPS))


def soak_plan(bundle: Bundle, micro: int, steps: int, seed: int) -> tuple[list[Step], int]:
    """(the optimizer steps, the number of the step before which the evaluation and the save come).

    The longest and the shortest are micro batches with the most and the fewest tokens, padding included: some batchings
    shuffle a step's micro batches, so that the longest sample may be in any.
    """
    lengths, effective = bundle.data.lengths, bundle.configuration.effective_batch_size
    by_length = sorted(range(len(lengths)), key=lambda one: (-lengths[one], one))
    rng = random.Random(seed)
    ordinary: list[int] = []
    while len(ordinary) < steps * effective:
        ordinary += rng.sample(range(len(lengths)), len(lengths))
    plan = plan_of(bundle, ordinary[: max(0, steps - 3) * effective], micro)
    ends = plan_of(bundle, by_length[:effective], micro) + plan_of(bundle, by_length[-effective:], micro)
    by_size = sorted(
        (one for step in ends + plan for one in step),
        key=lambda one: _size(shape_of(one, lengths, bundle.recipe)),
    )
    # Two micro batches are as bad as a whole step: the second one runs with the gradients of the first in place.
    most = 1 if bundle.recipe.steps_in_backward else 2
    longest, shortest = [by_size[-most:]], [by_size[:most]]
    middle = len(plan) // 2
    before = longest + plan[:middle] + shortest
    return (before + longest + plan[middle:])[:steps], min(len(before), steps - 1)


def _size(shape: tuple[int, int]) -> tuple[int, int]:
    """What micro batches are ordered by: their tokens, and of as many tokens the longer rows, for their attention."""
    rows, width = shape
    return rows * width, width


def run_soak(asked: RunSoak, device: Device, tell: Callable[[ChildMessage], None] = lambda _: None) -> Soak:
    """Soak a candidate until its steps are done or its seconds have passed. TrainingError and out of memory pass."""
    spec, candidate = asked.spec, asked.candidate
    bundle, micro = ready(asked, device, tell)
    steps = spec.search.soak_steps or steps_of(spec, candidate)
    evaluation_size = candidate.evaluation_batch_size or micro
    return soak(bundle, micro, steps, asked.seed, evaluation_size, asked.seconds, asked.state)


def soak(
    bundle: Bundle, micro: int, steps: int, seed: int, evaluation_size: int, seconds: float, file: Path | None = None
) -> Soak:
    """Run the soak's steps on a bundle that is ready to train, from the state in `file` on, if there is one."""
    plan, middle = soak_plan(bundle, micro, steps, seed)
    soaking = Soaking(bundle, State.load(file, steps), evaluation_size, seconds, file)
    soaking.run(plan, middle)
    state, seen = soaking.state, soaking.state.evaluation or evaluate(bundle, evaluation_size)
    by_fifth = drift.fifths(state.losses)
    return Soak(
        micro_batch_size=micro,
        steps=state.done,
        wanted_steps=steps,
        segments=state.segments,
        worst_case_steps=sum(step is plan[0] for step in plan[: state.done]),
        evaluation_batch_size=evaluation_size,
        evaluation_loss=seen.loss,
        evaluation_accuracy=seen.accuracy,
        evaluation_scores=seen.scores,
        evaluation_rows=min(len(bundle.data.validation), EVALUATED[bundle.spec.search.verify]),
        evaluation_seconds=seen.seconds,
        generation_seconds=seen.generating,
        saved_bytes=state.saved,
        peak_bytes=state.peak,
        retries=state.retries,
        growth_bytes=drift.grown(state.live),
        last_loss=by_fifth[-1] if by_fifth else None,
        lowest_loss=min(by_fifth) if len(state.losses) >= LEAST_FOR_FIFTHS else None,
    )


class Soaking:
    """A soak under way: what this process has seen of its steps beside the `state`, which outlives the process."""

    def __init__(self, bundle: Bundle, state: State, evaluation_size: int, seconds: float, file: Path | None) -> None:
        self.state = state
        self._bundle, self._evaluation_size, self._file = bundle, evaluation_size, file
        self._began, self._seconds = time.perf_counter(), seconds
        self._retrying = 0  # how many steps running the allocator had to free its cache
        self._paces: list[float] = []  # seconds a padded token of undisturbed steps
        self._early: list[tuple[Prepared, float]] = []  # undisturbed steps, and the seconds that they took

    def run(self, plan: list[Step], middle: int) -> None:
        """Train the plan's steps that are left, as far as time allows; TrainingError where something goes wrong.

        The evaluation and the save come before the step `middle`, or once half the time has passed.
        """
        self.state.segments += 1
        first = self.state.done
        with contextlib.closing(optimizer_steps.prepared(self._bundle, plan[first:])) as prepared:
            for number in range(first, len(plan)):
                if number > first and self.state.evaluation and self._left() < 0:
                    break
                if self.state.evaluation is None and (number >= middle or self._left() < self._seconds / 2):
                    self._evaluate_and_save()
                step = self._train(prepared, number, number > first)
                self._watch_memory(step, number)
                if self.state.done % SAVE_EVERY == 0:
                    self.state.save(self._file)
        self.state.save(self._file)
        if drift.slowing(self._paces):
            confirm_slowing(self._bundle, self._early, self.state.done)

    def _left(self) -> float:
        """Seconds that are left for the soak."""
        return self._began + self._seconds - time.perf_counter()

    def _evaluate_and_save(self) -> None:
        self.state.evaluation = evaluate(self._bundle, self._evaluation_size)
        self.state.saved = save(self._bundle)
        if minimises_memory(self._bundle.spec):  # elsewhere the evaluation's batch is the largest that fits
            self.state.peak = max(self.state.peak, self._bundle.device.peak())

    def _train(self, prepared: Iterator[Prepared], number: int, may_be_early: bool) -> Prepared:
        """Train the next step; TrainingError where the allocator had to free its cache as in the step before."""
        device = self._bundle.device
        retries, began, around = device.retries(), time.perf_counter(), device.neighbours()
        step = next(prepared)
        launched = time.perf_counter()
        _step(self._bundle, step, number, self.state)
        share = device.others_share(around, device.neighbours())
        if share is None or share <= MOST_OTHERS:
            now = time.perf_counter()
            self._paces.append((now - began) / sum(batch["input_ids"].numel() for batch in step[0]))
            if may_be_early and len(self._early) < REPEATED_EARLY:
                self._early.append((step, now - launched))
        retries = device.retries() - retries
        self.state.retries += retries
        self._retrying = self._retrying + 1 if retries else 0
        if self._retrying >= 2:
            raise TrainingError(f"the allocator had to free its cache on two steps running (step {number})", "memory")
        return step

    def _watch_memory(self, step: Prepared, number: int) -> None:
        """TrainingError where the memory in use between steps grows, and goes on to while this step is repeated."""
        live = self.state.live
        if pace := drift.growth(live):
            pause = drift.longest_pause(live[len(live) // 3 :])  # before, much is allocated for the first time
            confirm_growth(self._bundle, step, number, pace, pause, self._left())
            self.state.live = []  # it was the shapes' first time: watched anew from here


def _step(bundle: Bundle, step: Prepared, number: int, state: State) -> None:
    batches, terms, _ = step
    bundle.device.reset_peak()
    loss, norm = optimizer_steps.optimizer_step(bundle, batches, terms)
    bundle.device.synchronize()
    result = optimizer_steps.StepResult(float(loss), float(norm))
    optimizer_steps.check(bundle, result, number)
    state.done = number + 1
    state.losses.append(result.loss)
    state.peak = max(state.peak, bundle.device.peak())
    state.live.append(bundle.device.live())


def confirm_slowing(bundle: Bundle, early: list[tuple[Prepared, float]], done: int) -> None:
    """TrainingError when early steps, trained again, take clearly longer than they did; `done` steps came before.

    They are trained once more after a pause, as a neighbour that the device cannot see may slow them for a while.
    """
    if times_as_long(bundle, early, done) <= drift.MOST_SLOWING:
        return
    time.sleep(PAUSE_SECONDS)
    slower = times_as_long(bundle, early, done)
    if slower > drift.MOST_SLOWING:
        raise TrainingError(f"its steps became {slower:.1f} times slower over {done} steps", "numbers")


def times_as_long(bundle: Bundle, early: list[tuple[Prepared, float]], done: int) -> float:
    """How many times as long early steps take when they are trained again: the median of the undisturbed, 1 without."""
    times, repeated = [], State(len(early))
    for step, seconds in early:
        around, began = bundle.device.neighbours(), time.perf_counter()
        _step(bundle, step, done, repeated)
        taken = time.perf_counter() - began
        share = bundle.device.others_share(around, bundle.device.neighbours())
        if share is None or share <= MOST_OTHERS:
            times.append(taken / seconds)
    return statistics.median(times) if times else 1.0


def confirm_growth(
    bundle: Bundle, step: Prepared, number: int, pace: float, pause: int = 0, left: float = math.inf
) -> None:
    """TrainingError when memory goes on growing at half of that pace or more while one and the same step is repeated.

    Libraries keep something for each shape that they meet, as oneDNN does on a CPU (its primitive cache), so that
    memory also grows while shapes are new. A leak grows without them. The step is repeated for three times the longest
    pause in which memory did not grow, or each third of the repeats might miss a jump; but for no more seconds than are
    `left`, once it was repeated a dozen times.
    """
    repeats = min(max(LEAST_REPEATS, math.ceil(3 * drift.NOISE_BYTES / pace), 3 * (pause + 1)), MOST_REPEATS)
    repeated, until = State(repeats), time.perf_counter() + left
    while len(repeated.live) < repeats and (len(repeated.live) < LEAST_REPEATS or time.perf_counter() < until):
        _step(bundle, step, number, repeated)
    first, _, last = drift.thirds(repeated.live)
    grown = (last - first) / (len(repeated.live) * 2 / 3)
    if grown >= pace / 2:
        pace_mib = grown / 2**20
        sentence = f"memory held between steps keeps growing, by {pace_mib:.2f} MiB a step while one step is repeated"
        raise TrainingError(sentence, "memory")


def evaluate(bundle: Bundle, size: int) -> Evaluation:
    """Evaluate the first validation samples as the recipe says; TrainingError when the loss is not finite.

    A batch of the longest comes before, which takes as much memory as any that a run's evaluation has.
    """
    recipe, every = replace(bundle.recipe, evaluation_batch_size=size), bundle.data.validation
    longest = sorted(every, key=lambda sample: -len(sample[0]))[:size]
    plain = replace(recipe, evaluation=None)
    training_evaluation.evaluate(bundle.model, longest, bundle.tokenizer, bundle.device.torch, plain)
    started, samples = time.perf_counter(), every[: EVALUATED[bundle.spec.search.verify]]
    scores = training_evaluation.evaluate(bundle.model, samples, bundle.tokenizer, bundle.device.torch, recipe)
    loss, accuracy, generating = (scores.pop(name, None) for name in ("loss", "accuracy", "generation_seconds"))
    if loss is None or not math.isfinite(loss):
        raise TrainingError(f"the evaluation loss is {loss}", "numbers")
    return Evaluation(loss, accuracy, time.perf_counter() - started, scores, generating)


def save(bundle: Bundle) -> int:
    """Save the adapter or model as a run would, to a temporary folder; return the bytes written.

    0 where the folder's disk has no room, which says nothing of the configuration: a run saves elsewhere.
    """
    whole = bundle.recipe.lora is None
    weights = [one for one in bundle.model.parameters() if whole or one.requires_grad]
    needed = sum(one.numel() * one.element_size() for one in weights)
    if needed > shutil.disk_usage(tempfile.gettempdir()).free - LEFT_FREE:
        return 0
    with tempfile.TemporaryDirectory(prefix="dynotune-save-") as folder:
        bundle.model.save_pretrained(folder)
        return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
