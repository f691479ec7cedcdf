"""Finetune with the configuration that dynotune measured as the fastest stable one. This file is yours: change it.

    python train.py [--model PATH] [--data PATH] [--epochs E] [--max-steps N] [--output DIR] [--log FILE]

Needs torch, transformers and peft (for LoRA and QLoRA), bitsandbytes (for QLoRA and 8-bit optimizers), and pyarrow
when the data is parquet. From top to bottom: what was found, data, batching, model, training, evaluation, main.
On a CPU, set OMP_WAIT_POLICY=PASSIVE before starting it, as dynotune did: it matters where others compute too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, get_scheduler

from service.exports.templates.batching import collate, epoch_plan, prepare
from service.exports.templates.common import (
    CONFIG,
    IGNORED,
    MOST_SKIPPED,
    Batch,
    Sample,
    Step,
    autocast_dtype,
    gradient_norm,
    is_classifier,
    is_masked,
    lever,
)
from service.exports.templates.data import load_data, locate
from service.exports.templates.model import build_model, make_optimizer
from service.exports.templates.segments import moved

# ---- training ----


def autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context of forward and loss."""
    dtype = autocast_dtype()
    cache = CONFIG["precision"].get("cache", True)
    return torch.autocast(device.type, dtype=dtype, cache_enabled=cache) if dtype else contextlib.nullcontext()


def loss_of(model: Any, batch: Batch, count: torch.Tensor) -> torch.Tensor:
    """The micro batch's share of the step's mean loss: its sum over the `count` terms of the whole step."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    if is_classifier():
        logits = model(**inputs).logits
        return torch.nn.functional.cross_entropy(logits.float(), batch["labels"], reduction="sum") / count
    if is_masked():
        logits = model(**inputs).logits.float()
        target = batch["labels"].flatten()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target, reduction="sum") / count
    loss: torch.Tensor = model(**batch, num_items_in_batch=count, use_cache=False).loss
    return loss


def optimizer_step(
    model: Any, optimizer: Any, scaler: Any, batches: list[Batch], count: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward and backward of every micro batch, then one update; (loss, gradient norm), not waited for."""
    losses, items = [], torch.tensor(count, device=device)
    for batch in batches:
        batch = moved(batch, device)
        torch.compiler.cudagraph_mark_step_begin()
        with autocast(device):
            loss = loss_of(model, batch, items)
        (scaler.scale(loss) if scaler else loss).backward()
        losses.append(loss.detach().clone())
    if scaler:
        scaler.unscale_(optimizer)
    norm = gradient_norm(model, optimizer, CONFIG["training"]["max_grad_norm"])
    if scaler:
        scaler.step(optimizer)  # skips the update, and lowers the scale, when a gradient overflowed
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad()
    if lever("cache") == "emptied":
        torch.cuda.empty_cache()
    return torch.stack(losses).sum(), norm


def endless(samples: list[Sample]) -> Iterator[Step]:
    """The steps of epoch after epoch."""
    lengths, epoch = [len(ids) for ids, _ in samples], 0
    while True:
        yield from epoch_plan(lengths, epoch)
        epoch += 1


def loaded(steps: Iterator[Step], make: Callable[[Step], Any], pin: bool) -> Iterator[tuple[list[Batch], int, int]]:
    """Each step's batches, the terms of its loss and its tokens, made where it was measured best."""
    return map(make, steps) if pin else iter(())  # LEVERS: loading


def train(
    model: Any, samples: list[Sample], pad: int, args: argparse.Namespace, log: Any, report: Callable[[int], Any]
) -> int:
    """All optimizer steps, with a line every --every steps; how many. Stops with a sentence when numbers go wrong.

    `report` evaluates and says so, every training.evaluation_steps.
    """
    device, training = torch.device(args.device), CONFIG["training"]
    optimizer = make_optimizer(model)
    scaler = torch.amp.GradScaler(device.type) if CONFIG["precision"].get("scaler") else None
    per_epoch = len(epoch_plan([len(ids) for ids, _ in samples], 0))
    total = args.max_steps if args.max_steps is not None else math.ceil(args.epochs * per_epoch)
    name = "constant_with_warmup" if training["schedule"] == "constant" else training["schedule"]
    schedule = get_scheduler(name, optimizer, math.ceil(total * training["warmup_ratio"]), total)
    steps = loaded(endless(samples), lambda step: prepare(step, samples, pad), device.type == "cuda")
    upcoming, skipped, since, tokens = next(steps), 0, time.perf_counter(), 0
    for number in range(1, total + 1):
        batches, count, counted = upcoming
        rate = schedule.get_last_lr()[0]
        device_loss, device_norm = optimizer_step(model, optimizer, scaler, batches, count, device)
        upcoming = next(steps)  # made while the device computes
        loss, norm = float(device_loss), float(device_norm)  # waits for the device
        skipped = skipped + 1 if scaler and math.isfinite(loss) and not math.isfinite(norm) else 0
        sound = math.isfinite(loss) and norm != 0 and (math.isfinite(norm) or 0 < skipped <= MOST_SKIPPED)
        if not sound:
            sys.exit(
                f"stopped at step {number}: the loss is {loss} and the gradient norm {norm}; this run cannot be saved"
            )
        if not skipped:
            schedule.step()
        tokens += counted
        line = {"step": number, "loss": loss, "grad_norm": norm, "learning_rate": rate, "tokens": counted}
        write(log, line)
        if number % args.every == 0 or number in (1, total):
            speed, since, tokens = tokens / (time.perf_counter() - since), time.perf_counter(), 0
            print(
                f"step {number}/{total}  epoch {number / per_epoch:.2f}  loss {loss:.4f}  gradient norm {norm:.3g}"
                f"  learning rate {rate:.3g}  {speed:,.0f} non-padding tokens/s{'  (skipped)' if skipped else ''}",
                flush=True,
            )
        if training["evaluation_steps"] and number % training["evaluation_steps"] == 0 and number < total:
            paused = time.perf_counter()
            report(number)
            since += time.perf_counter() - paused
    return int(total)


def evaluation(model: Any) -> contextlib.AbstractContextManager[Any]:
    """The model as it was evaluated; gives a function where completions are generated and scored."""
    return contextlib.nullcontext(model)  # LEVERS: evaluation


@torch.no_grad()  # type: ignore[untyped-decorator]
def evaluate(model: Any, samples: list[Sample], tokenizer: Any, device: torch.device) -> dict[str, float]:
    """Loss, share of classes or tokens guessed right, and what generated completions score."""
    model.eval()
    with evaluation(model) as score, autocast(device):
        loss, accuracy = guessed(model, samples, tokenizer.pad_token_id, device)
        most = CONFIG["dataset"]["max_length"]
        scores = score(samples, CONFIG["evaluation_batch_size"], most, tokenizer) if score else {}
    model.train()
    return {"evaluation_loss": loss, "evaluation_accuracy": accuracy, **scores}


def guessed(model: Any, samples: list[Sample], pad: int, device: torch.device) -> tuple[float, float]:
    """(mean loss, share of classes or next tokens guessed right) in padded batches, longest first."""
    size, ordered = CONFIG["evaluation_batch_size"], sorted(samples, key=lambda sample: len(sample[0]), reverse=True)
    total, items, right = 0.0, 0, 0
    for start in range(0, len(ordered), size):
        rows = [[sample] for sample in ordered[start : start + size]]
        batch = moved(collate(rows, pad, mask=True), device)
        output = model(**batch)
        target, guess = batch["labels"], output.logits.argmax(-1)
        if not is_classifier() and not is_masked():
            target, guess = target[:, 1:], guess[:, :-1]
        counted = int((target != IGNORED).sum())
        total += float(output.loss) * counted
        items += counted
        right += int(((guess == target) & (target != IGNORED)).sum())
    return total / items, right / items


def save(model: Any, tokenizer: Any, source: str, output: Path) -> None:
    """The adapter, or the whole model, with the tokenizer."""
    if CONFIG["method"] == "full":
        model.config.use_cache = True  # off while training only
    else:
        model.peft_config["default"].base_model_name_or_path = source
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def write(log: Any, line: dict[str, Any]) -> None:
    """One JSON line into the log, when there is one."""
    if log:
        log.write(json.dumps(line) + "\n")
        log.flush()


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line; what is not given is as in CONFIG."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", default=CONFIG["model"]["source"], help="folder or hub id")
    parser.add_argument("--data", default=CONFIG["dataset"]["source"], help="file, folder or hub id")
    parser.add_argument("--epochs", type=float, default=CONFIG["training"]["epochs"])
    parser.add_argument("--max-steps", type=int, help="optimizer steps, instead of epochs")
    parser.add_argument("--output", type=Path, default=Path("output"), help="folder to save to")
    parser.add_argument("--log", type=Path, help="file for one JSON line a step")
    parser.add_argument("--every", type=int, default=10, help="steps between progress lines")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Load, train, evaluate, save."""
    args = arguments(argv)
    device = torch.device(args.device)
    if device.type == "cpu" and hasattr(os, "sched_getaffinity"):
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    print(f"{CONFIG['measured']}\nnow on {args.device}: {CONFIG['method']}, {CONFIG['levers']}", flush=True)
    revisions = {
        name: CONFIG[name]["revision"] if given == CONFIG[name]["source"] else None
        for name, given in (("model", args.model), ("dataset", args.data))
    }
    folder = locate(args.model, revisions["model"], "model")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=args.trust_remote_code)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    samples, held = load_data(args.data, revisions["dataset"], tokenizer)
    model = build_model(folder, tokenizer, samples + held, device, args.trust_remote_code)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(args.log.open("w", encoding="utf-8")) if args.log else None

        def report(step: int) -> float:
            """Evaluate and say so; the loss."""
            found = evaluate(model, held, tokenizer, device)
            write(log, {"step": step, **found})
            kind = "accuracy" if is_classifier() else f"{'masked' if is_masked() else 'next'}-token accuracy"
            loss, accuracy, *more = found.values()
            scores = "".join(f", {name} {score:.1f}" for name, score in zip(list(found)[2:], more, strict=True))
            text = f"loss {loss:.4f}, {kind} {accuracy:.4f}{scores}"
            print(f"evaluation on {len(held)} samples after {step} steps: {text}", flush=True)
            return float(loss)

        done = train(model, samples, tokenizer.pad_token_id, args, log, report)
        save(model, tokenizer, args.model, args.output)  # first: an evaluation that runs out of memory costs nothing
        print(f"saved {'the model' if CONFIG['method'] == 'full' else 'the adapter'} to {args.output}", flush=True)
        loss = report(done)
    if not math.isfinite(loss):
        sys.exit(f"the evaluation loss is {loss}: what was saved is of no use")


if __name__ == "__main__":
    main()
