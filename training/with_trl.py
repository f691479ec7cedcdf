"""The training run with TRL's SFTTrainer in place of the loop of training/script.py.

This file is not run itself: the export `trl` prints it, with all functions that it calls, for one recipe.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from training.batches import epoch_steps
from training.errors import TrainingError
from training.model import build_model, compile_model
from training.optimization import make_optimizer
from training.recipe import Recipe
from training.samples import Sample
from training.source import load_data
from training.trainers import Lines, Order, arguments

ARGUMENTS: dict[str, Any] = {}  # of SFTConfig; the export writes those of the recommendation


class Arranged(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer that takes the samples in a given order."""

    order: Order

    def _get_train_sampler(self, train_dataset: Any = None) -> Order:
        del train_dataset
        return self.order


def rows_of(samples: list[Sample]) -> Any:
    """The tokenised samples as TRL takes them: token ids, and labels with -100 for what is not learnt."""
    return Dataset.from_list([{"input_ids": list(ids), "labels": list(labels)} for ids, labels in samples])


def main(argv: list[str] | None = None, *, recipe: Recipe) -> None:
    """Load, train, save, evaluate."""
    args = arguments(argv, recipe)
    changed: dict[str, Any] = {
        "output_dir": str(args.output),
        "max_steps": args.max_steps,
        "use_cpu": args.device == "cpu",
    }
    changed |= {"logging_steps": 1} if args.log else {}
    settings = SFTConfig(**ARGUMENTS | changed)
    tokenizer = AutoTokenizer.from_pretrained(args.model, **recipe.source_options)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    samples, held_out = load_data(args.data, tokenizer, recipe)
    model = build_model(args.model, tokenizer, samples + held_out, torch.device(args.device), recipe)
    compile_model(model, recipe)
    lengths = [len(ids) for ids, _ in samples]
    trainer_class = SFTTrainer if recipe.packed else Arranged  # what TRL packs, TRL also orders
    trainer = trainer_class(
        model=model,
        args=settings,
        train_dataset=rows_of(samples),
        eval_dataset=rows_of(held_out),
        optimizers=(make_optimizer(model, recipe), None),
        processing_class=tokenizer,
        callbacks=[Lines(args.log)] if args.log else None,
    )
    if not recipe.packed:
        trainer.order = Order(lambda epoch: epoch_steps(lengths, epoch, recipe), len(samples))
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_model()
    trainer.evaluate()


if __name__ == "__main__":
    try:
        main()  # type: ignore[call-arg]  # the export gives every function its recipe
    except (TrainingError, OSError) as problem:
        sys.exit(f"trl_sft.py: {problem}")
