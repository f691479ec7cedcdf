"""Arranges samples in optimizer steps, and makes each step's tensors."""

from __future__ import annotations

import random
from array import array
from collections.abc import Generator, Iterable, Sequence

import torch

from training.recipe import Recipe, apply, task_of
from training.samples import IGNORED, Batch, MicroBatch, Sample, Step

Prepared = tuple[list[Batch], int, int]  # a step's batches, number of loss terms, number of tokens without padding


def epoch_steps(lengths: Sequence[int], epoch: int, recipe: Recipe) -> list[Step]:
    """All optimizer steps of an epoch: the samples shuffled by seed and epoch, then arranged."""
    seed, order = recipe.seed + epoch, list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    return arranged(order, lengths, seed, recipe)


def arranged(order: Sequence[int], lengths: Sequence[int], seed: int, recipe: Recipe) -> list[Step]:
    """Arrange the samples, taken in `order`, in optimizer steps; `lengths[sample]` is in tokens.

    The loss is a mean over a step's terms, so arrangements that put the same samples in a step learn the same.
    """
    plan: list[Step] = apply(
        recipe.batching,
        order,
        lengths,
        effective=recipe.effective_batch_size,
        micro=recipe.micro_batch_size,
        row_length=recipe.max_length,
        seed=seed,
        group_steps=recipe.group_steps,
    )
    if recipe.fills_micro_batches:
        return [[filled_up(part, recipe.micro_batch_size) for part in step] for step in plan]
    return plan


def filled_up(micro_batch: MicroBatch, size: int) -> MicroBatch:
    """The micro batch filled up to `size` rows: a row without samples is all padding, of which nothing is learnt."""
    return micro_batch + [[] for _ in range(size - len(micro_batch))]


def padded_width(longest: int, recipe: Recipe) -> int:
    """The number of tokens that rows are padded to, at least that of the longest row.

    A model may have no positions beyond `max_length`. Rounding goes past it only where a row is longer already: such a
    row holds several samples, each with its own positions.
    """
    if recipe.pad_multiple == 0:
        return max(longest, recipe.max_length)
    if recipe.pad_multiple == 1:
        return longest
    rounded = -(-longest // recipe.pad_multiple) * recipe.pad_multiple
    return rounded if longest > recipe.max_length else min(rounded, recipe.max_length)


def joined(parts: Iterable[array[int]], rows: int) -> torch.Tensor:
    """The parts one after the other, as an int64 tensor of `rows` rows. Arrays join faster than slices of tensors."""
    values = array("i")
    for part in parts:
        values += part
    return torch.frombuffer(values, dtype=torch.int32).long().view(rows, -1)


def collate(rows: list[list[Sample]], pad: int, recipe: Recipe) -> Batch:
    """A micro batch's tensors [rows, tokens] on the host, padded on the right as if by one more sample in each row."""
    width, filled = padded_width(max(sum(len(ids) for ids, _ in row) for row in rows), recipe), []
    for row in rows:
        rest = width - sum(len(ids) for ids, _ in row)
        filled += [*row, (array("i", [pad]) * rest, array("i", [IGNORED]) * rest)]
    batch: Batch = {"input_ids": joined((ids for ids, _ in filled), len(rows))}
    if recipe.labels_are_classes:
        batch["labels"] = torch.tensor([targets[0] for ((_, targets),) in rows])
    else:
        batch["labels"] = joined((targets for _, targets in filled), len(rows))
    if recipe.packed:  # positions begin again at 0 with each sample of a row
        batch["position_ids"] = joined((array("i", range(len(ids))) for ids, _ in filled), len(rows))
    if recipe.masked:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        for mask, row in zip(batch["attention_mask"], rows, strict=True):
            mask[sum(len(ids) for ids, _ in row) :] = 0
    if recipe.tells_where_samples_end:
        batch |= segments([ids for ids, _ in filled])
    if recipe.tells_what_is_learnt:
        batch["target_positions"] = target_positions(batch["labels"])
    return batch


def target_positions(labels: torch.Tensor) -> torch.Tensor:
    """Indices in the flattened rows of all positions whose next token is learnt; no row's first token is."""
    return (labels.view(-1) != IGNORED).nonzero().squeeze(1) - 1


def segments(samples: list[array[int]]) -> Batch:
    """transformers' `cu_seq_lens_*` (int32, [samples + 1]) and `max_length_*`: where samples end in flattened rows."""
    lengths = [len(ids) for ids in samples if ids]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def prepare(step: Step, samples: Sequence[Sample], pad: int, recipe: Recipe) -> Prepared:
    """(a step's batches on the host, the number of terms of its loss, its number of tokens without padding)."""
    rows = [[[samples[at] for at in row] for row in micro_batch] for micro_batch in step]
    batches = [collate(part, pad, recipe) for part in rows]
    members = [sample for part in rows for row in part for sample in row]
    return batches, sum(map(task_of(recipe).loss_terms, members)), sum(len(ids) for ids, _ in members)


def prepared(steps: Iterable[Step], samples: Sequence[Sample], pad: int, recipe: Recipe) -> Generator[Prepared]:
    """Prepare each step when it is asked for, in this process or in the recipe's worker processes."""
    if recipe.loading is not None:
        return apply(recipe.loading, steps, lambda step: prepare(step, samples, pad, recipe), recipe.pin_memory)
    if recipe.pin_memory and torch.accelerator.is_available():  # train.py may run elsewhere than it was measured
        made = (prepare(step, samples, pad, recipe) for step in steps)
        return (([pinned(batch) for batch in batches], terms, tokens) for batches, terms, tokens in made)
    return (prepare(step, samples, pad, recipe) for step in steps)


def pinned(batch: Batch) -> Batch:
    """The batch with its tensors in pinned host memory, from which a GPU copies while it computes."""
    return {name: value.pin_memory() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def moved(batch: Batch, device: torch.device, recipe: Recipe) -> Batch:
    """The batch with its tensors on the device and its plain numbers as they are."""
    if not recipe.tells_where_samples_end:
        return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
