"""What the scripts for other trainers share: their command line, the order of the samples, and a log."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback

from training.recipe import Recipe
from training.samples import Step


def arguments(argv: list[str] | None, recipe: Recipe) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train with the configuration that dynotune measured.")
    parser.add_argument("--model", default=recipe.model, help="folder or hub id")
    parser.add_argument("--data", default=recipe.dataset, help="file, folder or hub id")
    parser.add_argument("--max-steps", type=int, default=-1, help="optimizer steps, instead of epochs")
    parser.add_argument("--output", type=Path, default=Path("output"), help="folder to save to")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    parser.add_argument("--log", type=Path, help="file for one JSON line a step")
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument("--device", choices=devices, default=devices[0], help="CUDA_VISIBLE_DEVICES says which GPU")
    args = parser.parse_args(argv)
    if args.max_steps != -1 and args.max_steps < 1:
        parser.error(f"--max-steps is {args.max_steps}, and must be more than 0")
    return args


def on_one_device(settings: Any) -> Any:
    """The TrainingArguments, set so that the trainer uses one GPU, as was measured.

    It would else split its batches over all GPUs. Started by torchrun or accelerate, each process has one GPU anyway.
    """
    if settings.n_gpu > 1:
        settings._n_gpu = 1
    return settings


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The TrainingArguments that the command line gives."""
    found = {"output_dir": str(args.output), "max_steps": args.max_steps, "use_cpu": args.device == "cpu"}
    return found | ({"logging_steps": 1} if args.log else {})


class Order(Sampler):  # type: ignore[misc]
    """All samples of an epoch in the order of its plan. A trainer cuts them into micro batches of a fixed size."""

    def __init__(self, plan: Callable[[int], list[Step]], size: int) -> None:
        self.plan, self.size, self.epoch = plan, size, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        for step in self.plan(self.epoch):
            for micro_batch in step:
                for row in micro_batch:
                    yield from row

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer when an epoch begins."""
        self.epoch = epoch


class MeasuredOrderAndLoss:
    """Makes a trainer take the samples in the measured order and the loss that was measured.

    The loss of a step is divided by the number of its terms here: Trainer's own is a sum of means where a model accepts
    `num_items_in_batch` and ignores it, as BERT does. A trainer that orders the samples by itself gets no `order`.
    """

    accelerator: Any
    order: Order | None
    summed_loss: Callable[[Any, Any, Any], torch.Tensor]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **more: Any
    ) -> Any:
        """The micro batch's share of the step's loss; in an evaluation the trainer's own loss."""
        if return_outputs or num_items_in_batch is None:
            own = super().compute_loss  # type: ignore[misc]
            return own(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **more)
        return self.summed_loss(model, inputs, num_items_in_batch) * self.accelerator.num_processes

    def _get_train_sampler(self, *data: Any) -> Any:
        own = super()._get_train_sampler  # type: ignore[misc]
        return own(*data) if self.order is None else self.order


class Lines(TrainerCallback):  # type: ignore[misc]
    """Writes what the trainer logs to a file, a JSON line each, after those of a run that is resumed."""

    def __init__(self, path: Path, resumed: bool) -> None:
        self.path = path
        if not resumed:
            path.unlink(missing_ok=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any) -> None:
        """Add a line."""
        del args, control, more
        with self.path.open("a", encoding="utf-8") as log:
            log.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")
