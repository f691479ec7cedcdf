"""The part of the exported train.py that makes batches."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Sequence

import torch

from service.exports.templates.common import CONFIG, IGNORED, Batch, MicroBatch, Row, Sample, Step, is_classifier, lever
from service.exports.templates.data import terms

# ---- batching: samples -> optimizer steps of micro batches of rows -> tensors ----


def pack(samples: Sequence[int], lengths: Sequence[int], row_length: int) -> list[Row]:
    """Best-fit decreasing: the longest sample first, each into the fullest row that still has room for it."""
    rows: list[Row] = []
    room: list[tuple[int, int]] = []  # (tokens free, row), sorted
    for sample in sorted(samples, key=lambda one: (-lengths[one], one)):
        place = bisect_left(room, (lengths[sample], -1))
        if place < len(room):
            free, row = room.pop(place)
        else:
            free, row = row_length, len(rows)
            rows.append([])
        rows[row].append(sample)
        insort(room, (free - lengths[sample], row))
    return rows


def epoch_plan(lengths: Sequence[int], epoch: int) -> list[Step]:
    """All optimizer steps of an epoch, shuffled by seed and epoch, arranged as the batching lever says.

    Every arrangement but `grouped` keeps the samples of a step together, and the loss is normalised over the step,
    so all of them learn the same as plain padding does.
    """
    batching, micro, effective = lever("batching"), CONFIG["micro_batch_size"], CONFIG["effective_batch_size"]
    seed = CONFIG["training"]["seed"] + epoch
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)

    def longest_first(some: list[int]) -> list[int]:
        return sorted(some, key=lambda one: (-lengths[one], one))

    def cut(rows: list[Row]) -> list[MicroBatch]:
        return [rows[at : at + micro] for at in range(0, len(rows), micro)]

    plan: list[Step] = []
    if batching == "grouped":  # sorted over some steps, cut, shuffled, and dealt out again
        rng, span, per_step = random.Random(seed), CONFIG["group_steps"] * effective, max(1, effective // micro)
        for start in range(0, len(order), span):
            batches = cut([[one] for one in longest_first(order[start : start + span])])
            rng.shuffle(batches)
            plan += [batches[at : at + per_step] for at in range(0, len(batches), per_step)]
        return plan
    for start in range(0, len(order), effective):
        samples = order[start : start + effective]
        if batching == "packed":
            plan.append(cut(pack(samples, lengths, CONFIG["dataset"]["max_length"])))
        else:
            plan.append(cut([[one] for one in (longest_first(samples) if batching == "sorted" else samples)]))
    return plan


def collate(rows: list[list[Sample]], pad: int, mask: bool) -> Batch:
    """Tensors of rows of samples, padded on the right to the longest row.

    Packed rows have positions that restart at each sample and no mask, by which transformers keeps the samples
    apart; padding is a sample of its own. Right padding needs no mask under causal attention either.
    """
    shape = (len(rows), max(sum(len(ids) for ids, _ in row) for row in rows))
    ids, labels = torch.full(shape, pad), torch.full(shape, IGNORED)
    positions, attended = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    for at, row in enumerate(rows):
        start = 0
        for sample, target in row:
            end = start + len(sample)
            ids[at, start:end] = torch.tensor(sample)
            if not is_classifier():
                labels[at, start:end] = torch.tensor(target)
            positions[at, start:end] = torch.arange(len(sample))
            start = end
        positions[at, start:] = torch.arange(shape[1] - start)
        attended[at, :start] = 1
    if is_classifier():
        classes = torch.tensor([row[0][1][0] for row in rows])
        return {"input_ids": ids, "attention_mask": attended, "labels": classes}
    batch = {"input_ids": ids, "labels": labels}
    if mask:
        batch["attention_mask"] = attended
    elif lever("batching") == "packed":
        batch["position_ids"] = positions
    return batch


def prepare(step: Step, samples: list[Sample], pad: int, device: torch.device) -> tuple[list[Batch], int, int]:
    """A step's batches on the host, the terms of its loss, and its tokens without padding."""
    mask = lever("batching") == "padded"
    batches = [collate([[samples[one] for one in row] for row in micro], pad, mask) for micro in step]
    if device.type == "cuda":
        batches = [{name: value.pin_memory() for name, value in batch.items()} for batch in batches]
    every = [samples[one] for micro in step for row in micro for one in row]
    return batches, sum(map(terms, every)), sum(len(ids) for ids, _ in every)
