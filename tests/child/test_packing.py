"""Packed rows compute what their samples compute alone: logits, loss and gradients, whatever the attention.

Mixed samples are silent (no error, a loss that looks right), so each test has a companion that breaks the packing
and must see it.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.child import tiny
from tests.factory import configuration
from training import batches
from training.samples import IGNORED, Batch, Sample, sample_of
from training.tasks import causal_lm
from worker.child.build import recipe_of

PAD = 0
TOLERANCE = 1e-4
# Wide weights: attention then matters, and what leaks between samples shows.
RANGE = 0.3
VOCABULARY = 512
RECIPE = recipe_of(tiny.job(Path("model"), Path("data.jsonl")), configuration())
CASES = list(itertools.product(("llama", "qwen3"), ("eager", "sdpa")))  # varlen: tests/levers/test_families.py
MODELS: dict[tuple[str, str], Any] = {}

Rows = list[list[Sample]]


@pytest.fixture(params=CASES, ids=["-".join(case) for case in CASES])
def model(request: pytest.FixtureRequest) -> Any:
    """Every family with every attention of the catalogue, drawn once."""
    if request.param not in MODELS:
        kind, attention = request.param
        MODELS[request.param] = tiny.draw(kind, attention, RANGE, vocabulary=VOCABULARY)
    made = MODELS[request.param]
    made.zero_grad(set_to_none=True)
    return made


def sample(rng: random.Random, length: int) -> Sample:
    """Random tokens, the first third of them a prompt that is not learnt."""
    ids = [rng.randrange(3, VOCABULARY) for _ in range(length)]
    asked = max(1, length // 3)
    return sample_of(ids, [IGNORED] * asked + ids[asked:])


def collate(rows: Rows, mask: bool = False, packed: bool = False) -> Batch:
    """The rows as a batch: padded with or without a mask, or packed."""
    return batches.collate(rows, PAD, replace(RECIPE, masked=mask, packed=packed))


def ragged(seed: int) -> Rows:
    """Three rows of two to four samples; the rows' fills differ."""
    rng = random.Random(seed)
    rows = [[sample(rng, rng.randint(2, 17)) for _ in range(count)] for count in (2, 4, 3)]
    fills = {sum(len(ids) for ids, _ in row) for row in rows}
    assert len(fills) > 1, "choose a seed whose rows have padding"
    return rows


def flat(rows: Rows) -> list[Sample]:
    """All samples."""
    return [one for row in rows for one in row]


def items_of(rows: Rows) -> torch.Tensor:
    """Loss terms of all rows."""
    return torch.tensor(sum(causal_lm.loss_terms(one) for one in flat(rows)))


def logits_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits of a batch."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits


def alone(model: Any, rows: Rows) -> list[torch.Tensor]:
    """Logits of each sample, run alone with nothing but its ids."""
    return [logits_of(model, {"input_ids": torch.tensor([list(ids)])})[0] for ids, _ in flat(rows)]


def cut(logits: torch.Tensor, rows: Rows) -> list[torch.Tensor]:
    """The packed logits, sample by sample."""
    found = []
    for at, row in enumerate(rows):
        start = 0
        for ids, _ in row:
            found.append(logits[at, start : start + len(ids)])
            start += len(ids)
    return found


def away(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    """The largest difference."""
    return max(float((one - other).abs().max()) for one, other in zip(first, second, strict=True))


def loss_and_gradients(model: Any, made: list[Batch], items: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """The step's loss and gradients over micro batches."""
    losses = []
    for batch in made:
        loss = causal_lm.summed_loss(model, batch, items)
        loss.backward()
        losses.append(float(loss.detach()))
    return sum(losses), tiny.gradients(model)


@pytest.mark.parametrize("seed", [1, 2])
def test_packed_logits_are_those_of_the_samples_alone(model: Any, seed: int) -> None:
    rows = ragged(seed)
    packed = cut(logits_of(model, collate(rows, packed=True)), rows)
    assert away(packed, alone(model, rows)) < TOLERANCE


@pytest.mark.parametrize("seed", [1, 2])
def test_packed_loss_and_gradients_are_those_of_the_samples_alone(model: Any, seed: int) -> None:
    rows = ragged(seed)
    items = items_of(rows)
    singles = [collate([[one]]) for one in flat(rows)]
    expected_loss, expected = loss_and_gradients(model, singles, items)
    loss, found = loss_and_gradients(model, [collate(rows, packed=True)], items)
    assert loss == pytest.approx(expected_loss, abs=TOLERANCE)
    assert tiny.furthest(found, expected) < TOLERANCE


def test_the_loss_counts_the_labelled_tokens_only(model: Any) -> None:
    rows = ragged(3)
    terms = []
    for (ids, labels), logits in zip(flat(rows), alone(model, rows), strict=True):
        at = [place for place in range(1, len(ids)) if labels[place] != IGNORED]
        picked = logits[[place - 1 for place in at]]
        terms.append(torch.nn.functional.cross_entropy(picked, torch.tensor(list(ids))[at], reduction="sum"))
    expected = float(torch.stack(terms).sum() / items_of(rows))
    with torch.no_grad():
        loss = causal_lm.summed_loss(model, collate(rows, packed=True), items_of(rows))
    assert float(loss) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("mask", [True, False])
def test_padded_rows_agree_with_and_without_the_mask(model: Any, mask: bool) -> None:
    rows = [[one] for one in flat(ragged(4))]
    batch = collate(rows, mask=mask)
    assert ("attention_mask" in batch) is mask and "position_ids" not in batch
    assert away(cut(logits_of(model, batch), rows), alone(model, rows)) < TOLERANCE


def test_a_row_of_one_sample_among_packed_ones_and_samples_of_one_token(model: Any) -> None:
    rng = random.Random(5)
    rows = [[sample(rng, 9)], [sample(rng, 1), sample(rng, 1), sample(rng, 4)], [sample(rng, 12), sample(rng, 1)]]
    packed = cut(logits_of(model, collate(rows, packed=True)), rows)
    assert away(packed, alone(model, rows)) < TOLERANCE


def test_more_padding_changes_nothing(model: Any) -> None:
    rows = ragged(6)
    wide = [*rows, [sample(random.Random(7), 90)]]
    batch = collate(wide, packed=True)
    assert batch["input_ids"].shape == (4, 90)
    assert away(cut(logits_of(model, batch), wide)[:-1], alone(model, rows)) < TOLERANCE


def test_positions_that_do_not_restart_are_seen(model: Any) -> None:
    """The companion: the same comparison, with positions that run on across samples, is far outside."""
    rows = ragged(1)
    batch = collate(rows, packed=True)
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand(len(rows), -1).clone()
    assert away(cut(logits_of(model, batch), rows), alone(model, rows)) > 0.1
    items = items_of(rows)
    _, broken = loss_and_gradients(model, [batch], items)
    _, right = loss_and_gradients(model, [collate(rows, packed=True)], items)
    assert tiny.furthest(broken, right) > 100 * TOLERANCE


def test_an_attention_mask_beside_packed_positions_is_seen(model: Any) -> None:
    """The other way to mix samples: a mask switches the detection of packed rows off."""
    rows = ragged(1)
    batch = collate(rows, packed=True)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    assert away(cut(logits_of(model, batch), rows), alone(model, rows)) > 0.1


def test_padding_is_a_segment_of_its_own_and_the_first_token_of_each_sample_is_not_a_target() -> None:
    first, second = sample_of([5, 6, 7], [IGNORED, 6, 7]), sample_of([8, 9], [IGNORED, 9])
    rows: Rows = [[first, second], [sample_of([4], [IGNORED]), sample_of([3, 3], [IGNORED, 3])]]
    batch = collate(rows, packed=True)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [4, 3, 3, PAD, PAD]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 0, 1]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7, IGNORED, 9], [IGNORED, IGNORED, 3, IGNORED, IGNORED]]
