"""Times the job's work unit: every micro batch by device marks, counting the timings that no other process disturbed.

The unit's time is the sum over its batches of the median of their clean timings, or of their mean where candidates take
turns; its interval is a bootstrap over them. Mean tokens over the median step's seconds would not do: where lengths
vary, that flatters grouping.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from functools import cached_property

from service.contract.measurement import Slice, Timing
from training.samples import Step
from worker.child import sizes, typical
from worker.child.arrange import shape_of
from worker.child.build import Bundle
from worker.child.passes import Pass
from worker.child.pieces import Pieces, interval, stalling
from worker.child.turns import Turns

LEAST_TIMED_SECONDS, LEAST_STEPS = 3.0, 10  # that a fast device is timed for, in several passes where one is shorter
MOST_PASSES = 50
ENOUGH_SHAPES = 4  # for the three numbers of the cost model, with one to spare
ENOUGH_SECONDS = 5.0  # of a trial's unit on a fast device: the rest is predicted (docs/decisions/0032)


@dataclass
class Unit:
    """The work unit arranged for one micro batch size, with the timings, losses and gradient norms gathered so far."""

    bundle: Bundle
    micro: int
    plan: list[Step]
    pieces: Pieces = field(default_factory=Pieces)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    shapes_of: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # step -> its micro batches' shapes
    waits: dict[int, list[float]] = field(default_factory=dict)  # step -> seconds waited for the next step's batches
    clocks: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)  # (MHz, why it was lowered) at readings
    turns: Turns | None = None
    enough_seconds: float | None = None  # of the first pass: later steps are predicted where that is possible
    timed_steps: int | None = None  # how many of the plan's first steps are timed; None for all
    most_seconds: float | None = None  # of the unit: its first pass is given up once it is expected to take longer
    turned: list[tuple[int, tuple[int, int], float]] = field(default_factory=list)  # (turn, piece, seconds)
    passes: int = 0
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    retries: int = 0
    warmed: list[tuple[int, int]] = field(default_factory=list)  # shapes that the warm-up ran
    warm_seconds: float = 0.0

    def run(self, deadline: float | None = None) -> bool:
        """Train one pass over the unit; False when the deadline (of time.perf_counter) cut it short.

        The first pass ends early, too, where the unit is expected to take longer than `most_seconds`, or where
        `enough_seconds` of it were timed. Later passes then have the same steps.
        """
        device = self.bundle.device
        retries = device.retries()
        try:
            return Pass(self, deadline).run()
        finally:
            self.retries += device.retries() - retries

    def is_hopeless(self) -> bool:
        """Whether enough of the first pass is timed to expect that the unit takes longer than is worth timing it."""
        if self.most_seconds is None or not self._predicts_after(LEAST_TIMED_SECONDS):
            return False
        seconds = sum(map(statistics.median, self._pieces().values()))
        return self.token_factor() * seconds > self.most_seconds

    def rest_is_predicted(self) -> bool:
        """Whether enough of the first pass is timed to predict the rest of the unit instead of timing it."""
        return self.enough_seconds is not None and self._predicts_after(self.enough_seconds)

    def _predicts_after(self, seconds: float) -> bool:
        """Whether so many seconds of the first pass are timed, none disturbed, and predict the other steps' shapes."""
        if self.passes or self.pieces.seconds() < seconds:
            return False
        if self.pieces.dirty:  # what others used of the device may be all that makes it slow
            return False
        return self.first_steps_predict_rest(len(self.shapes_of))

    def first_steps_predict_rest(self, count: int) -> bool:
        """Whether the timings of the plan's first steps tell what the others take.

        What is left must be of shapes that are timed, or no longer than these where there are enough to tell how
        seconds grow: the cost model extrapolates badly.
        """
        timed = {shape for number in range(count) for shape in self.shapes_in(number)}
        left = {shape for number in range(count, len(self.plan)) for shape in self.shapes_in(number)} - timed
        longest = max(width for _, width in timed)
        return not left or (len(timed) >= ENOUGH_SHAPES and all(width <= longest for _, width in left))

    def _pieces(self) -> dict[tuple[int, int], list[float]]:
        """Each piece's timings; where the first pass has not reached a piece, the seconds that its shape predicts."""
        timed = self.pieces.best()
        if len(timed) == piece_count(self.plan):
            return timed
        model, update = sizes.cost_model(self.shapes()), statistics.fmean(self._updates())
        found = {}
        for number in range(len(self.plan)):
            expected = sizes.predicted(model, [(*shape, 0.0) for shape in self.shapes_in(number)])
            for at, seconds in enumerate([*expected, update]):
                found[number, at] = timed.get((number, at), [seconds])
        return found

    def shapes_in(self, number: int) -> list[tuple[int, int]]:
        """The shapes of a step's micro batches, as they ran, or else as they would."""
        lengths, recipe = self.bundle.data.lengths, self.bundle.recipe
        return self.shapes_of.get(number) or [shape_of(micro, lengths, recipe) for micro in self.plan[number]]

    @property
    def timed_share(self) -> float:
        """The share of the unit's pieces that have a timing."""
        return len(self.pieces.best()) / piece_count(self.plan)

    @property
    def chosen(self) -> list[Step]:
        """The steps that are timed."""
        return self.plan[: self.timed_steps]

    def timing(self) -> Timing:
        """The timing of the unit from the passes so far."""
        factor, of_steps = self.token_factor(), self._run_shapes.steps_a_token / self._unit_shapes.steps_a_token
        pieces = self._pieces()
        # What others do slows all that take turns, so that a stall is the candidate's own.
        longer = factor * (stalling(pieces) if self.turns is not None else 1.0)
        seconds, low, high = (longer * one for one in interval(pieces, self._away()))
        samples = [sample for step in self.plan for micro in step for row in micro for sample in row]
        shapes = [shape for number in range(len(self.plan)) for shape in self.shapes_in(number)]
        clocks = [clock for clock, _ in self.clocks]
        waited = statistics.fmean(statistics.median(waits) for waits in self.waits.values()) * len(self.plan)
        updates = max(0.0, self.updates_seconds() - waited)
        return Timing(
            micro_batch_size=self.micro,
            seconds=seconds,
            low=low,
            high=high,
            samples=len(samples),
            tokens=self._unit_shapes.tokens,
            padded_tokens=sum(rows * width for rows, width in shapes),
            steps=len(self.plan),
            passes=self.passes,
            timed_share=self.timed_share,
            token_factor=factor,
            waiting_seconds=of_steps * waited,
            update_seconds=of_steps * updates,
            peak_bytes=self.peak_bytes,
            reserved_bytes=self.reserved_bytes,
            retries=self.retries,
            clean_share=self.pieces.clean_share(),
            largest_share_of_others=self.pieces.worst_share,
            clock_mhz=(min(clocks), max(clocks)) if clocks else None,
            slowed_by=tuple(sorted({reason for _, reasons in self.clocks for reason in reasons})),
        )

    def token_factor(self) -> float:
        """How much longer a token takes in a run than in this unit (worker/child/typical.py)."""
        update = statistics.fmean(self._updates())
        return typical.token_factor(self._unit_shapes, self._run_shapes, self.shapes(), update)

    @cached_property
    def _unit_shapes(self) -> typical.Shapes:
        return typical.Shapes(self.plan, self.bundle.data.lengths, self.bundle)

    @cached_property
    def _run_shapes(self) -> typical.Shapes:
        return typical.of_run(self.bundle, self.micro)

    def updates_seconds(self) -> float:
        """The seconds of all the unit's updates with the waits for the next steps' batches."""
        return statistics.fmean(self._updates()) * len(self.plan)

    def _updates(self) -> list[float]:
        """The median seconds of each update with the wait for the next step's batches."""
        pieces = self.pieces.best().items()
        return [statistics.median(times) for (number, at), times in pieces if at == len(self.plan[number])]

    def first_calls(self) -> float:
        """How many seconds longer the warm-up's steps took than the same micro batches and updates when timed."""
        of_shape: dict[tuple[int, int], float] = {}
        updates = []
        for (number, at), times in self._pieces().items():
            shapes = self.shapes_in(number)
            if at < len(shapes):
                of_shape[shapes[at]] = statistics.median(times)
            else:
                updates.append(statistics.median(times))
        again = sum(of_shape.get(shape, 0.0) for shape in self.warmed) + len(self.warmed) * statistics.fmean(updates)
        return max(0.0, self.warm_seconds - again)

    def slices(self) -> tuple[Slice, ...]:
        """What each turn took, and what it would have taken at the unit's mean pace by the shapes that it trained."""
        shapes = self.shapes()
        of_shape = dict(zip(shapes, sizes.predicted(sizes.cost_model(shapes), shapes), strict=True))
        by_piece = dict(zip(self._micro_batches(), (of_shape[shape] for shape in shapes), strict=True))
        updates = statistics.fmean(seconds for _, piece, seconds in self.turned if piece not in by_piece)
        taken: dict[int, float] = {}
        expected: dict[int, float] = {}
        for turn, piece, seconds in self.turned:
            taken[turn] = taken.get(turn, 0.0) + seconds
            expected[turn] = expected.get(turn, 0.0) + by_piece.get(piece, updates)
        pace = sum(taken.values()) / sum(expected.values())
        return tuple(Slice(turn=turn, seconds=taken[turn], expected=expected[turn] * pace) for turn in sorted(taken))

    def _micro_batches(self) -> list[tuple[int, int]]:
        """The pieces of `shapes`, in its order."""
        best = self.pieces.best()
        return [(step, at) for step, ones in self.shapes_of.items() for at in range(len(ones)) if (step, at) in best]

    def _away(self) -> list[float]:
        """Relative distances of the timed micro batches from the seconds that the cost model predicts."""
        shapes = self.shapes()
        predicted = sizes.predicted(sizes.cost_model(shapes), shapes)
        return [seconds / expected - 1 for (_, _, seconds), expected in zip(shapes, predicted, strict=True)]

    def shapes(self) -> list[tuple[int, int, float]]:
        """(rows, tokens of the longest, seconds) of every timed micro batch."""
        best = self.pieces.best()
        return [(*self.shapes_of[step][at], statistics.median(best[step, at])) for step, at in self._micro_batches()]


def piece_count(plan: list[Step]) -> int:
    """How many pieces (micro batches and updates) a plan has."""
    return sum(len(step) + 1 for step in plan)


def timed_enough(seconds: float, steps_timed: int) -> bool:
    """Whether a unit is timed enough: for LEAST_TIMED_SECONDS and LEAST_STEPS, or for ENOUGH_SECONDS."""
    return seconds >= ENOUGH_SECONDS or (seconds >= LEAST_TIMED_SECONDS and steps_timed >= LEAST_STEPS)


def unit_timed_enough(unit: Unit) -> bool:
    """Whether enough of a unit is timed; where the host does not run ahead, one pass always is."""
    return not unit.bundle.device.runs_ahead or timed_enough(unit.pieces.seconds(), unit.passes * len(unit.chosen))


def time_unit(unit: Unit, passes: int, extra: int = 2, deadline: float | None = None) -> None:
    """Train `passes` passes over the unit, and up to `extra` more while some piece has too few clean timings.

    A device that takes little time for the unit trains it until `unit_timed_enough`.
    """
    while unit.passes < MOST_PASSES:
        is_clean = unit.passes >= passes and not unit.pieces.short(piece_count(unit.chosen), passes)
        if unit_timed_enough(unit) and (is_clean or unit.passes >= passes + extra):
            return
        if not unit.run(deadline):
            return
