"""The part of the exported train.py that makes batches."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from service.exports.templates.common import (
    CONFIG,
    Batch,
    Sample,
    Step,
    is_classifier,
    is_masked,
    lever,
    padded_width,
)
from service.exports.templates.data import terms
from service.exports.templates.segments import TOLD, rows_of, segments

# ---- batching: samples -> optimizer steps of micro batches of rows -> tensors ----


def epoch_plan(lengths: Sequence[int], epoch: int) -> list[Step]:
    """All optimizer steps of an epoch, shuffled by seed and epoch, arranged as measured.

    The loss is normalised over a step's tokens, so arrangements that keep its samples learn what plain padding does.
    """
    seed = CONFIG["training"]["seed"] + epoch
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    return arranged(
        order,
        lengths,
        effective=CONFIG["effective_batch_size"],
        micro=CONFIG["micro_batch_size"],
        row_length=CONFIG["dataset"]["max_length"],
        seed=seed,
        group_steps=CONFIG["group_steps"],
    )


def arranged(order: Sequence[int], lengths: Sequence[int], **sizes: int) -> list[Step]:
    """The steps of the samples in `order`."""
    return [[[[sample]]] for sample in order]  # LEVERS: batching


def collate(rows: list[list[Sample]], pad: int, mask: bool) -> Batch:
    """Tensors of rows of samples, padded on the right.

    Packed rows have positions that restart at each sample and no mask, by which transformers keeps the samples
    apart; padding is a sample of its own. Right padding needs no mask under causal attention either.
    """
    longest = max(sum(len(ids) for ids, _ in row) for row in rows)
    width = padded_width(longest, CONFIG["padding"]["multiple"], CONFIG["dataset"]["max_length"])
    batch, packed = rows_of(rows, pad, width), CONFIG["packed"] and not mask
    if packed or not (mask or is_classifier() or is_masked()):
        del batch["attention_mask"]
    if not packed:
        del batch["position_ids"]
    if is_classifier():
        batch["labels"] = torch.tensor([row[0][1][0] for row in rows])
    if CONFIG["attention"] == "varlen" or (CONFIG["attention"] in TOLD and packed):
        batch |= segments(rows, width)
    return batch


def prepare(step: Step, samples: list[Sample], pad: int) -> tuple[list[Batch], int, int]:
    """A step's batches on the host, the terms of its loss, and its tokens without padding."""
    mask = lever("batching") == "padded"
    batches = [collate([[samples[one] for one in row] for row in micro], pad, mask) for micro in step]
    every = [samples[one] for micro in step for row in micro for one in row]
    return batches, sum(map(terms, every)), sum(len(ids) for ids, _ in every)
