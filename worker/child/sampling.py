"""The rows of a large dataset that a job is measured on: tokenising a million rows takes longer than its trials."""

from __future__ import annotations

import random
import string
from typing import Any, NamedTuple

from training.reading import Record
from training.recipe import Recipe

MOST_ROWS = 20_000  # their mean length has a standard error of 0.7% where lengths deviate by as much as their mean
MOST_BYTES = 100_000_000  # about 25 million tokens, which a tokenizer on one core reads in a minute or two
LEAST_ROWS, LEAST_STEPS = 1_000, 8  # rows, however long they are, and optimizer steps that they have to make
# The rows with the most bytes, and those with the most that are rare, of which one is likely to have the most tokens: a
# tokenizer has few tokens for what is neither a letter of English nor a space, and takes up to one a byte for it.
LONGEST_ROWS = 64
USUAL = (string.ascii_letters + " ").encode()


class Rows(NamedTuple):
    """The rows that are tokenised: those `drawn` stand for all, the `others` for what only few rows show."""

    drawn: list[Record]
    others: list[Record]


def sampled(rows: list[Record], recipe: Recipe) -> Rows:
    """All rows where they are few; else a sample of them in their order, the same at each call.

    One row is drawn from each of as many equal stretches as rows are wanted, so that a dataset of several parts, one
    after the other, is represented by all of them. The others are the longest rows, which decide how much memory a
    micro batch takes, and the first row of each label, which decide how many classes there are. UnicodeEncodeError
    where a row holds half of a surrogate pair.
    """
    sizes, rare = [], []
    for row in rows:
        counts = [_byte_counts(row.get(column)) for column in recipe.columns.values()]
        sizes.append(sum(of_all for of_all, _ in counts))
        rare.append(sum(of_rare for _, of_rare in counts))
    mean = max(1.0, sum(sizes) / max(1, len(sizes)))
    least = max(LEAST_ROWS, LEAST_STEPS * recipe.effective_batch_size)
    wanted = max(least, min(MOST_ROWS, int(MOST_BYTES / mean)))
    if wanted >= len(rows):
        return Rows(rows, [])
    rng = random.Random(0)
    edges = [at * len(rows) // wanted for at in range(wanted + 1)]
    drawn = [rng.randrange(low, high) for low, high in zip(edges, edges[1:], strict=False)]
    longest = [sorted(filter(of.__getitem__, range(len(rows))), key=lambda at: -of[at]) for of in (sizes, rare)]
    others = {at for ranked in longest for at in ranked[:LONGEST_ROWS]}
    if "label" in recipe.columns:
        first: dict[str, int] = {}
        for at, row in enumerate(rows):
            first.setdefault(str(row[recipe.columns["label"]]), at)
        others.update(first.values())
    return Rows([rows[at] for at in drawn], [rows[at] for at in sorted(others.difference(drawn))])


def _byte_counts(value: Any) -> tuple[int, int]:
    """How many bytes the texts of a row's column have in UTF-8 with all turns, and how many of these are rare."""
    if isinstance(value, str):
        text = value.encode()
        return len(text), len(text.translate(None, USUAL))
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    parts = [_byte_counts(one) for one in inner]
    return sum(of_all for of_all, _ in parts), sum(of_rare for _, of_rare in parts)
