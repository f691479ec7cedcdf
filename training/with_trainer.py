"""The training run with transformers' Trainer in place of the loop of training/script.py.

This file is not run itself: the export `trainer` prints it, with all functions that it calls, for one recipe.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from training.batches import collate, epoch_steps
from training.model import build_model, compile_model
from training.optimization import make_optimizer
from training.recipe import Recipe, task_of
from training.source import load_data, tokenizer_of
from training.trainers import Lines, MeasuredOrderAndLoss, Order, arguments, given, on_one_device

ARGUMENTS: dict[str, Any] = {}  # of TrainingArguments; the export writes those of the recommendation


class Arranged(MeasuredOrderAndLoss, Trainer):  # type: ignore[misc]
    """Trainer with the measured order and loss."""


def main(argv: list[str] | None = None, *, recipe: Recipe) -> None:
    """Load, train, save, evaluate."""
    args = arguments(argv, recipe)
    settings = on_one_device(TrainingArguments(**ARGUMENTS | given(args)))
    tokenizer = tokenizer_of(args.model, recipe)
    samples, held_out = load_data(args.data, tokenizer, recipe)
    model = build_model(args.model, tokenizer, (samples, held_out), torch.device(args.device), recipe)
    compile_model(model, recipe)
    lengths = [len(ids) for ids, _ in samples]
    trainer = Arranged(
        model=model,
        args=settings,
        train_dataset=samples,
        eval_dataset=held_out,
        data_collator=lambda rows: collate([[row] for row in rows], tokenizer.pad_token_id, recipe),
        optimizers=(make_optimizer(model, recipe), None),
        processing_class=tokenizer,
        callbacks=[Lines(args.log, args.resume)] if args.log else None,
    )
    trainer.order = Order(lambda epoch: epoch_steps(lengths, epoch, recipe), len(samples))
    trainer.summed_loss = lambda model, batch, count: task_of(recipe).summed_loss(model, batch, count)
    trainer.model_accepts_loss_kwargs = True  # so that it counts the terms of a step
    if recipe.evaluates_eagerly:  # or the model would be compiled anew for each shape of an evaluation's batches
        trainer.evaluate = torch.compiler.set_stance("force_eager")(trainer.evaluate)
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_model()
    trainer.evaluate()
