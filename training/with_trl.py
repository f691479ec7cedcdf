"""The training run with TRL's SFTTrainer in place of the loop of training/script.py.

This file is not run itself: the export `trl` prints it, with all functions that it calls, for one recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from training.batches import collate, epoch_steps
from training.model import build_model, compile_model
from training.optimization import make_optimizer
from training.recipe import Recipe, task_of
from training.samples import Sample, sample_of
from training.source import load_data, tokenizer_of
from training.trainers import Lines, MeasuredOrderAndLoss, Order, arguments, given, on_one_device

ARGUMENTS: dict[str, Any] = {}  # of SFTConfig; the export writes those of the recommendation


class Arranged(MeasuredOrderAndLoss, SFTTrainer):  # type: ignore[misc]
    """SFTTrainer with the measured order and loss.

    SFTTrainer's own loss has its own output layer, which also computes the entropy and the accuracy of the
    predictions: with it, steps on a CPU took 1.8 times as long. Evaluations still use it.
    """


def rows_of(samples: Sequence[Sample]) -> Any:
    """The tokenised samples as TRL takes them: token ids, and labels with -100 for what is not learnt."""
    return Dataset.from_list([{"input_ids": list(ids), "labels": list(labels)} for ids, labels in samples])


def main(argv: list[str] | None = None, *, recipe: Recipe) -> None:
    """Load, train, save, evaluate."""
    args = arguments(argv, recipe)
    settings = on_one_device(SFTConfig(**ARGUMENTS | given(args)))
    tokenizer = tokenizer_of(args.model, recipe)
    samples, held_out = load_data(args.data, tokenizer, recipe)
    model = build_model(args.model, tokenizer, (samples, held_out), torch.device(args.device), recipe)
    compile_model(model, recipe)
    lengths = [len(ids) for ids, _ in samples]
    own_collator: dict[str, Any] = {}
    if not recipe.packed:  # what TRL packs, TRL also orders and collates
        own_collator["data_collator"] = lambda rows: collate(
            [[sample_of(row["input_ids"], row["labels"])] for row in rows], tokenizer.pad_token_id, recipe
        )
    trainer = Arranged(
        model=model,
        args=settings,
        train_dataset=rows_of(samples),
        eval_dataset=rows_of(held_out),
        optimizers=(make_optimizer(model, recipe), None),
        processing_class=tokenizer,
        callbacks=[Lines(args.log, args.resume)] if args.log else None,
        **own_collator,
    )
    trainer.order = None
    if not recipe.packed:
        trainer.order = Order(lambda epoch: epoch_steps(lengths, epoch, recipe), len(samples))
    trainer.summed_loss = lambda model, batch, count: task_of(recipe).summed_loss(model, batch, count)
    trainer.model_accepts_loss_kwargs = True  # so that it counts the terms of a step
    if recipe.evaluates_eagerly:  # or the model would be compiled anew for each shape of an evaluation's batches
        trainer.evaluate = torch.compiler.set_stance("force_eager")(trainer.evaluate)
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_model()
    trainer.evaluate()
