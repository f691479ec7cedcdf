"""Predicts from the batches timed so far which micro batch size is fastest.

The prediction chooses which size to time next (docs/decisions/0004). The times in a result are
measured, with two exceptions: the rest of a trial that is given up as clearly slower (docs/decisions/0031), and the
rest of a long unit on a GPU (0032).
"""

from __future__ import annotations

import numpy as np

from training.samples import Step
from worker.child.arrange import padded_shape

Shape = tuple[int, int, float]  # rows, tokens of the longest row, seconds


def cost_model(shapes: list[Shape]) -> np.ndarray:
    """Fit seconds = a + b x tokens + c x rows x length^2 by least squares of the relative errors; [a, b, c] >= 0."""
    seconds = np.array([shape[2] for shape in shapes])
    terms = np.array([_terms(rows, length) for rows, length, _ in shapes]) / seconds[:, None]
    active = [0, 1, 2]
    while True:
        found = np.zeros(3)
        found[active] = np.linalg.lstsq(terms[:, active], np.ones(len(shapes)), rcond=None)[0]
        below = [at for at in active if found[at] < 0]
        if not below or len(active) == 1:
            return np.maximum(found, 0)
        active.remove(min(below, key=lambda at: found[at]))


def _terms(rows: int, length: int) -> tuple[float, float, float]:
    return 1.0, float(rows * length), float(rows * length**2)


def predicted(model: np.ndarray, shapes: list[Shape]) -> list[float]:
    """The seconds that the model predicts for each shape, at least a microsecond."""
    return [max(1e-6, float(np.dot(model, _terms(rows, length)))) for rows, length, _ in shapes]


def predict(model: np.ndarray, plan: list[Step], lengths: list[int]) -> float:
    """The seconds that the model predicts for all micro batches of a plan together."""
    shapes = [padded_shape(micro, lengths) for step in plan for micro in step]
    return float(sum(np.dot(model, _terms(rows, length)) for rows, length in shapes))
