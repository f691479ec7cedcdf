"""How many tokens a step computes, by how its samples are arranged: simulated once on made-up lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.contract.measurement import DatasetFacts
from service.levers import LEVERS
from service.levers.batching import BUDGETED, ROWS

Floats = NDArray[np.float64]
Counts = tuple[float, float, float]  # micro batches, tokens, squares of rows
MICROS = (1, 2, 4, 8, 16, 32, 64, 128)  # the ladder of micro batches
BATCHING = LEVERS["batching"].names
PADDING = LEVERS["padding"].names
ACROSS = 8  # steps over which `grouped` sorts
SAMPLES = 4096  # that are simulated
PACKED_TOGETHER = 512  # samples that `packed-global` packs at a time: more would fill rows hardly better
UNIT_SAMPLES = 64  # of a work unit, by about which the share of its shapes is counted
MULTIPLES = {"longest": 1, "multiple-8": 8, "multiple-64": 64}


@dataclass(frozen=True)
class Lengths:
    """Lengths of samples in tokens: log-normal with a median and a spread, cut at `longest`."""

    median: float
    spread: float
    longest: int
    rows: int
    seed: int = 0

    def draw(self, count: int) -> NDArray[np.int64]:
        """Lengths of that many samples, always the same ones."""
        drawn = np.random.default_rng(self.seed).lognormal(np.log(self.median), self.spread, count)
        return np.clip(np.round(drawn), 8, self.longest).astype(np.int64)

    def facts(self) -> DatasetFacts:
        """What a trial would report of the data."""
        some = self.draw(4000)
        p50, p90, p99 = (int(one) for one in np.percentile(some, (50, 90, 99)))
        edges = [32 << at for at in range(16) if 32 << at < 2 * self.longest]
        counts = np.histogram(some, [0, *edges])[0]
        return DatasetFacts(
            fingerprint=f"{self.seed:016x}",
            rows=self.rows,
            validation_rows=max(1, self.rows // 20),
            tokens=int(some.mean() * self.rows),
            at_max_length=int((some == self.longest).mean() * self.rows),
            p50=p50,
            p90=p90,
            p99=p99,
            longest=self.longest,
            histogram={str(edge): int(count * self.rows / 4000) for edge, count in zip(edges, counts, strict=True)},
            formats=(".jsonl",),
        )


@dataclass(frozen=True)
class Arranged:
    """A step by (batching, padding, micro batch of MICROS, effective batch): means over simulated steps.

    `micros` counts micro batches, `tokens` what is computed, `squares` the sum of squared rows, which attention under
    a mask computes. `own` are samples' own squares and `real` their tokens, by effective batch. `warmed` are the tokens
    of one micro batch of each shape, as a share of a work unit's.
    """

    effectives: tuple[int, ...]
    micros: Floats
    tokens: Floats
    squares: Floats
    own: Floats
    real: Floats
    warmed: Floats


def arrange(lengths: Lengths, effectives: tuple[int, ...]) -> Arranged:
    """Simulate all arrangements, of the same samples for every effective batch, so that none has fewer tokens."""
    shape = (len(BATCHING), len(PADDING), len(MICROS), len(effectives))
    micros, tokens, squares, warmed = (np.full(shape, np.inf) for _ in range(4))
    own, real = np.zeros(len(effectives)), np.zeros(len(effectives))
    samples = lengths.draw(SAMPLES)
    packed = sum(_rows(some, lengths.longest) for some in samples.reshape(-1, PACKED_TOGETHER)) / SAMPLES
    for e, effective in enumerate(effectives):
        groups = samples.reshape(-1, min(ACROSS, SAMPLES // effective), effective)
        own[e], real[e] = float((groups**2).sum(-1).mean()), float(groups.sum(-1).mean())
        steps = groups.reshape(-1, effective)
        rows: dict[str, list[float]] = {
            "packed": [_rows(step, lengths.longest) for step in steps],
            "packed-global": [max(packed * effective, 1.0)],  # no row has more samples than a step
        }
        for b, batching in enumerate(BATCHING):
            for m, micro in enumerate(MICROS):
                size = min(micro, effective)
                counts = _by_padding(groups, rows.get(batching, []), batching, size, lengths.longest)
                micros[b, :, m, e], tokens[b, :, m, e], squares[b, :, m, e] = np.array(counts).T
                unit = groups[0, : max(1, UNIT_SAMPLES // effective)]
                multiples = (MULTIPLES.get(one, 0) for one in PADDING)
                warmed[b, :, m, e] = [_warmed(unit, batching, one, size, lengths.longest) for one in multiples]
    return Arranged(effectives, micros, tokens, squares, own, real, warmed)


def _by_padding(
    groups: NDArray[np.int64], rows: Sequence[float], batching: str, micro: int, longest: int
) -> list[Counts]:
    """What a mean step has under each padding; only rows that are padded differ in it. `rows` are the packed ones."""
    if batching in ROWS:
        return [_packed(rows, micro, longest)] * len(PADDING)
    if batching in BUDGETED:
        return [_within(groups.reshape(-1, groups.shape[-1]), batching, micro * longest)] * len(PADDING)
    return [_cut(groups, batching, micro, MULTIPLES.get(one, 0), longest) for one in PADDING]


def _cut(groups: NDArray[np.int64], batching: str, micro: int, multiple: int, longest: int) -> Counts:
    """(micro batches, computed tokens, squares of rows) of a mean step that is cut into padded micro batches."""
    effective = groups.shape[-1]
    if batching == "sorted":
        groups = np.sort(groups, axis=2)
    if batching == "grouped":
        groups = np.sort(groups.reshape(len(groups), -1), axis=1)
    rows = _padded(groups.reshape(-1, effective), micro, multiple, longest)
    return float(-(-effective // micro)), float(rows.sum(1).mean()), float((rows**2).sum(1).mean())


def _within(steps: NDArray[np.int64], batching: str, budget: int) -> Counts:
    """The same of steps whose micro batches have at most `budget` tokens."""
    if batching == "token-budget":
        return _means([_budgeted(np.sort(step)[::-1], budget) for step in steps])
    total = steps.sum(1)
    count = np.maximum(1, np.ceil(total / budget))
    return float(count.mean()), float(total.mean()), float((total**2 / count).mean())


def _packed(filled: Sequence[float], micro: int, longest: int) -> Counts:
    """The same of steps that fill so many rows each."""
    return _means([(max(1.0, np.ceil(rows / micro)), rows * longest, rows * longest**2) for rows in filled])


def _warmed(steps: NDArray[np.int64], batching: str, multiple: int, micro: int, longest: int) -> float:
    """The share of a unit's padded tokens that are in one micro batch of each of its shapes."""
    if batching in ROWS:
        return min(1.0, micro * longest / float(steps.sum()))
    if multiple == 0:
        return min(1.0, micro / steps.size)
    if batching in BUDGETED:
        return 1.0  # hardly two micro batches have one width
    if batching != "padded":
        across = steps if batching == "sorted" else steps.reshape(1, -1)
        steps = np.sort(across, axis=1).reshape(steps.shape)
    rows = [step[at : at + micro] for step in steps for at in range(0, steps.shape[1], micro)]
    tokens = [len(row) * int(-(-row.max() // multiple) * multiple) for row in rows]
    shapes = {(len(row), width) for row, width in zip(rows, tokens, strict=True)}
    return sum(width for _, width in shapes) / sum(tokens)


def _means(found: list[Counts]) -> Counts:
    first, second, third = (float(one) for one in np.mean(np.array(found), axis=0))
    return first, second, third


def _padded(steps: NDArray[np.int64], micro: int, multiple: int, longest: int) -> Floats:
    """The padded length of every sample where rows are cut into micro batches in their order."""
    effective = steps.shape[1]
    padded = np.zeros(steps.shape)
    for at in range(0, effective, micro):
        top = steps[:, at : at + micro].max(axis=1, keepdims=True).astype(np.float64)
        if multiple > 1:
            top = np.minimum(np.ceil(top / multiple) * multiple, max(longest, multiple))
        padded[:, at : at + micro] = longest if multiple == 0 else top
    return padded


def _budgeted(falling: NDArray[np.int64], budget: int) -> Counts:
    """A step's samples, longest first, in micro batches of at most `budget` padded tokens."""
    micros, tokens, squares, at = 0, 0.0, 0.0, 0
    while at < len(falling):
        top = float(falling[at])
        count = min(len(falling) - at, max(1, int(budget // top)))
        micros, at = micros + 1, at + count
        tokens, squares = tokens + count * top, squares + count * top**2
    return float(micros), tokens, squares


def _rows(step: NDArray[np.int64], longest: int) -> int:
    """How many rows a step's samples fill, by best fit of the longest first."""
    left: list[int] = []
    for length in sorted((int(one) for one in step), reverse=True):
        fits = [at for at, room in enumerate(left) if room >= length]
        if fits:
            left[min(fits, key=lambda one: left[one])] -= length
        else:
            left.append(longest - length)
    return len(left)
