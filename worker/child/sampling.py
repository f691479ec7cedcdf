"""The rows of a large dataset that a job is measured on: tokenising a million rows takes longer than its trials."""

from __future__ import annotations

import random
from typing import Any

from training.reading import Record
from training.recipe import Recipe

MOST_ROWS = 20_000  # of which the mean length is known within 1% where its standard deviation is as large as the mean
MOST_CHARACTERS = 100_000_000  # about 25 million tokens, which a tokenizer on one core reads in a minute or two
LEAST_ROWS, LEAST_STEPS = 1_000, 8  # whatever their length, and in optimizer steps
LONGEST = 8  # the rows with the most characters, of which one is likely to have the most tokens


def sampled(rows: list[Record], recipe: Recipe) -> list[Record]:
    """The rows themselves where they are few; else a sample of them in their order, the same at each call.

    One row is drawn from each of as many equal stretches as rows are wanted, so that a dataset of several parts, one
    after the other, is represented by all of them. The longest rows, which decide how much memory a micro batch takes,
    and the first row of each label, which decide how many classes there are, are always among them.
    """
    sizes = [sum(_characters(row.get(column)) for column in recipe.columns.values()) for row in rows]
    mean = max(1.0, sum(sizes) / max(1, len(sizes)))
    least = max(LEAST_ROWS, LEAST_STEPS * recipe.effective_batch_size)
    wanted = max(least, min(MOST_ROWS, int(MOST_CHARACTERS / mean)))
    if wanted >= len(rows):
        return rows
    rng = random.Random(0)
    edges = [at * len(rows) // wanted for at in range(wanted + 1)]
    taken = {rng.randrange(low, high) for low, high in zip(edges, edges[1:], strict=False)}
    taken.update(sorted(range(len(rows)), key=lambda at: -sizes[at])[:LONGEST])
    if "label" in recipe.columns:
        first: dict[str, int] = {}
        for at, row in enumerate(rows):
            first.setdefault(str(row[recipe.columns["label"]]), at)
        taken.update(first.values())
    return [rows[at] for at in sorted(taken)]


def _characters(value: Any) -> int:
    """How many characters the texts of a row's column have, in conversations those of all turns."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0
