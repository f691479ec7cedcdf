"""How much longer a token takes in a run than in the work unit, by the shapes of all micro batches of the run's epochs.

A batching makes other shapes of some dozens of samples than of all of them: a row in five hundred that is ten times as
long as the others is in no such unit, or in one too many, and few samples fill packed rows less well than many do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from training.batches import epoch_steps
from training.samples import Step
from worker.child.arrange import shape_of
from worker.child.build import Bundle

ENOUGH_SAMPLES = 2000  # that are arranged: of a small dataset, several epochs
TELLING = 1.5  # `a` is fitted only if the largest micro batch has so many times the tokens of the smallest


class Shapes:
    """The micro batches of some optimizer steps by their shapes, and how many steps and tokens without padding."""

    def __init__(self, plan: list[Step], lengths: Sequence[int], bundle: Bundle) -> None:
        self.steps = len(plan)
        self.tokens = sum(lengths[sample] for step in plan for micro in step for row in micro for sample in row)
        self.shapes = Counter(shape_of(micro, lengths, bundle.recipe) for step in plan for micro in step)

    @property
    def steps_a_token(self) -> float:
        """Optimizer steps for each token without padding."""
        return self.steps / self.tokens

    def seconds(self, a: float, b: float, update: float) -> float:
        """What they take where a micro batch takes `a` + `b` x its tokens, and each step's update `update` seconds."""
        micro = sum(count * (a + b * rows * width) for (rows, width), count in self.shapes.items())
        return micro + self.steps * update


def of_run(bundle: Bundle, micro: int) -> Shapes:
    """The shapes of a run's epochs at a micro batch size."""
    lengths, plan = bundle.data.typical, list[Step]()
    recipe = replace(
        bundle.recipe,
        micro_batch_size=micro,
        effective_batch_size=bundle.configuration.effective_batch_size,
        seed=bundle.spec.training.seed,
    )
    for epoch in range(-(-ENOUGH_SAMPLES // len(lengths))):
        plan += epoch_steps(lengths, epoch, recipe)
    return Shapes(plan, lengths, bundle)


def token_factor(unit: Shapes, run: Shapes, timed: list[tuple[int, int, float]], update: float) -> float:
    """The seconds of a token in the run over those in the unit, by `timed` micro batches (rows, width, seconds).

    Seconds are taken to grow with the tokens of a micro batch and not with the square of a row's, which would say too
    much of rows that are longer than any that was timed. Where all micro batches have about as many tokens, a fit could
    not tell a constant part from noise, and seconds are taken to be proportional to tokens.
    """
    rows = np.array([(1.0, count * width) for count, width, _ in timed])
    tokens, seconds = rows[:, 1], np.array([taken for _, _, taken in timed])
    a, b = 0.0, float(seconds.sum() / tokens.sum())
    if tokens.max() >= TELLING * tokens.min():
        fitted = np.linalg.lstsq(rows / seconds[:, None], np.ones(len(timed)), rcond=None)[0]
        a, b = map(float, fitted) if min(fitted) >= 0 else (a, b)
    return (run.seconds(a, b, update) / run.tokens) / (unit.seconds(a, b, update) / unit.tokens)
