"""The training run: what the exported train.py does from its command line to the saved model.

This file is not run itself: the export prints it, with all functions that it calls, specialised for one recipe.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import get_scheduler

from training.batches import epoch_steps, prepared
from training.errors import TrainingError
from training.evaluation import evaluate
from training.model import build_model, compile_model
from training.optimization import make_optimizer, trained_parameters
from training.recipe import Recipe
from training.samples import Sample
from training.source import load_data, tokenizer_of
from training.step import check_numbers, gradient_scaler, optimizer_step, overflowed


def arguments(argv: list[str] | None, recipe: Recipe) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train with the configuration that dynotune measured.")
    parser.add_argument("--model", default=recipe.model, help="folder or hub id")
    parser.add_argument(
        "--data",
        default=recipe.dataset,
        help="folder or hub id" if recipe.dataset_is_folder else "file of the same format and columns",
    )
    parser.add_argument("--epochs", type=float, default=recipe.epochs)
    parser.add_argument("--max-steps", type=int, help="optimizer steps, instead of epochs")
    parser.add_argument("--output", type=Path, default=Path("output"), help="folder to save to")
    parser.add_argument("--save-every", type=int, default=500, help="optimizer steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --output")
    parser.add_argument("--log", type=Path, help="file for one JSON line a step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    for name in ("epochs", "max_steps", "save_every"):
        if (value := getattr(args, name)) is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} is {value:g}, and must be more than 0")
    try:
        torch.device(args.device)
    except RuntimeError:
        parser.error(f"--device is {args.device}; it may be cpu, cuda, or a GPU of several such as cuda:1")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device is {args.device}, but torch sees no GPU here")
    return args


def train(
    model: Any,
    samples: Sequence[Sample],
    pad: int,
    args: argparse.Namespace,
    report: Callable[..., None],
    evaluate_now: Callable[[int], float],
    recipe: Recipe,
) -> int:
    """Run the optimizer steps that are left, with checkpoints; return how many steps the whole run has."""
    device, lengths = torch.device(args.device), [len(ids) for ids, _ in samples]
    optimizer = make_optimizer(model, recipe)
    scaler = gradient_scaler(device, recipe)
    total = args.max_steps or math.ceil(args.epochs * len(epoch_steps(lengths, 0, recipe)))
    # A warm-up's first step learns at a rate of 0, so at least one step must follow.
    warmup = min(math.ceil(total * recipe.warmup_ratio), total - 1)
    schedule = get_scheduler(recipe.schedule, optimizer, warmup, total)
    kept = {"optimizer": optimizer, "schedule": schedule}
    if recipe.loss_scaling:
        kept["scaler"], skipped = scaler, 0
    first = resume(model, kept, args.output / CHECKPOINT) if args.resume else 0
    if first > total:
        raise TrainingError(f"--resume: the checkpoint is of step {first}, and this run ends after {total}")
    plan = (step for epoch in itertools.count() for step in epoch_steps(lengths, epoch, recipe))
    steps = prepared(itertools.islice(plan, first, None), samples, pad, recipe)
    batches, terms, tokens = next(steps)
    unread: list[tuple[int, float, int, tuple[torch.Tensor, torch.Tensor]]] = []  # results that are on the device
    seen, since = 0, time.perf_counter()
    waited, bar = since, tqdm(range(first + 1, total + 1), initial=first, total=total)
    for number in bar:
        rate, seen = float(schedule.get_last_lr()[0]), seen + tokens  # torchao's rates are tensors
        results = optimizer_step(model, optimizer, scaler, batches, terms, device, recipe)
        unread.append((number, rate, seen, results))
        batches, terms, tokens = next(steps)  # the next step's, made while the device computes
        pauses = number % args.save_every == 0 or number == total
        if recipe.evaluation_steps:
            pauses = pauses or number % recipe.evaluation_steps == 0
        if not recipe.loss_scaling:
            schedule.step()
            if not pauses and time.perf_counter() - waited < WINDOW:
                continue  # a device that is waited for after each step runs out of work
        for step, its_rate, seen_by_then, on_device in unread:
            loss, norm = map(float, on_device)  # this waits for the device
            if recipe.loss_scaling and overflowed(loss, norm, skipped):
                skipped += 1
            else:
                check_numbers(step, loss, norm)
                if recipe.loss_scaling:
                    schedule.step()
                    skipped = 0
            seconds = time.perf_counter() - since
            report(step=step, loss=loss, grad_norm=norm, learning_rate=its_rate, tokens=seen_by_then, seconds=seconds)
        unread.clear()
        waited = time.perf_counter()
        bar.set_postfix_str(f"loss {loss:.4f}, gradient norm {norm:.3g}, {seen / seconds:,.0f} non-padding tokens/s")
        if number % args.save_every == 0:
            save_checkpoint(model, kept, number, args.output / CHECKPOINT)
        if recipe.evaluation_steps and number % recipe.evaluation_steps == 0 and number < total:
            paused = time.perf_counter()
            evaluate_now(number)
            since += time.perf_counter() - paused
    return total


CHECKPOINT = "checkpoint.pt"
WINDOW = 0.3  # seconds of steps that are launched back to back before the device is waited for


def save_checkpoint(model: Any, kept: dict[str, Any], step: int, path: Path) -> None:
    """Save what --resume needs, to another file that is then renamed, so that a checkpoint is always complete."""
    state: dict[str, Any] = {name: part.state_dict() for name, part in kept.items()}
    state |= {"weights": [one.data for one in trained_parameters(model)], "step": step}
    state |= {"random": torch.get_rng_state(), "random_on_gpus": torch.cuda.get_rng_state_all()}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".partial"))
    path.with_suffix(".partial").replace(path)


def resume(model: Any, kept: dict[str, Any], path: Path) -> int:
    """Load a checkpoint's state; return the number of steps that were done."""
    if not path.exists():
        raise TrainingError(f"--resume: there is no checkpoint {path}; --save-every says how often one is saved")
    state = torch.load(path, weights_only=True, map_location="cpu")  # not beside the model, where it may not fit
    for name, part in kept.items():
        part.load_state_dict(state[name])
    for parameter, weight in zip(trained_parameters(model), state["weights"], strict=True):
        parameter.data.copy_(weight)
    torch.set_rng_state(state["random"])
    for gpu, drawn in enumerate(state["random_on_gpus"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(drawn, gpu)
    return int(state["step"])


def save(model: Any, tokenizer: Any, source: str, output: Path, recipe: Recipe) -> None:
    """Save the adapter, or the whole model where there is none, with the tokenizer."""
    if recipe.lora is None:
        model.config.use_cache = True  # the KV cache is off while training only
    else:
        adapter = model.peft_config["default"]
        adapter.base_model_name_or_path, adapter.revision = source, recipe.source_options.get("revision")
        if recipe.heads:  # the base is loaded with its configuration: labels and padding token
            known = copy.copy(model.config)
            if recipe.quantization:
                del known.quantization_config  # or a checkpoint in full precision would be taken for a quantised one
            known.save_pretrained(output / "base")
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def usable_cores() -> int:
    """The cores that this process may use; a container may keep fewer busy than it sees (Linux, Control Group v2)."""
    found, quota = len(os.sched_getaffinity(0)), Path("/sys/fs/cgroup/cpu.max")
    most, _, period = quota.read_text().partition(" ") if quota.exists() else ("max", "", "")
    return found if most == "max" else max(1, min(found, int(most) // int(period)))


def main(argv: list[str] | None = None, *, recipe: Recipe) -> None:
    """Load, train, save, evaluate."""
    args = arguments(argv, recipe)
    device = torch.device(args.device)
    if device.index is not None and torch.accelerator.is_available():
        torch.accelerator.set_device_index(device.index)  # or some kernels would run on the first GPU, on its memory
    torch.set_num_threads(usable_cores())
    tokenizer = tokenizer_of(args.model, recipe)
    samples, held_out = load_data(args.data, tokenizer, recipe)
    model = build_model(args.model, tokenizer, (samples, held_out), device, recipe)
    compile_model(model, recipe)
    if args.log:
        args.log.parent.mkdir(parents=True, exist_ok=True)
        if not args.resume:
            args.log.unlink(missing_ok=True)

    def report(**line: float) -> None:
        if args.log:
            with args.log.open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")

    def evaluate_now(step: int) -> float:
        scores = evaluate(model, held_out, tokenizer, device, recipe)
        report(step=step, **{f"evaluation_{name}": score for name, score in scores.items()})
        text = ", ".join(f"{name} {score:.4f}" for name, score in scores.items())
        tqdm.write(f"evaluation on {len(held_out)} samples after {step} steps: {text}")
        return scores["loss"]

    steps = train(model, samples, tokenizer.pad_token_id, args, report, evaluate_now, recipe)
    save(model, tokenizer, args.model, args.output, recipe)  # before the evaluation, which may run out of memory
    tqdm.write(f"saved to {args.output}")
    if not math.isfinite(loss := evaluate_now(steps)):
        raise TrainingError(f"the evaluation loss is {loss}: what was saved is of no use", "numbers")
