"""A store of quantised weights on the worker: the first trial of a model quantises them, and later trials load them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from training.model import keep_layout, loaded_model, quantization
from training.recipe import Recipe

BESIDE = "dynotune.json"  # what is kept of a model beside its weights


def key_of(folder: Path, config: Any, recipe: Recipe) -> str:
    """Twelve hex digits of a hash over all that the quantised weights depend on: files, format, seed and versions."""
    files = sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin"), folder / "config.json"))
    marks = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    arguments = {name: str(value) for name, value in sorted(quantization(config, recipe, ()).to_dict().items())}
    arguments.pop("bnb_4bit_compute_dtype", None)  # says how to compute, and changes nothing in the stored weights
    rest = f"{recipe.task} {recipe.seed} {recipe.weights} {config.num_labels}"
    made_by = [_version(name) for name in ("transformers", "bitsandbytes", "torchao", "torch")]
    text = json.dumps([str(folder.resolve()), marks, arguments, rest, made_by], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def load(folder: Path, config: Any, device: torch.device, recipe: Recipe, store: Path | None) -> tuple[Any, float]:
    """(the quantised model, the seconds that quantising would have taken more than this call); errors pass through."""
    kept = store / key_of(folder, config, recipe) if store else None
    if kept and (kept / BESIDE).exists():
        started = time.perf_counter()
        try:
            beside = json.loads((kept / BESIDE).read_text())
            model = _kept(kept, config, device, recipe)
            model.drawn = list(beside["drawn"])  # they are among the stored weights, so that none seems to be missing
            os.utime(kept)  # marks it as in use, so that worker/runner/pruning.py does not delete it
            return model, max(0.0, float(beside["seconds"]) - (time.perf_counter() - started))
        except (OSError, ValueError, KeyError, SafetensorError):
            shutil.rmtree(kept, ignore_errors=True)  # broken, or half deleted by pruning: quantise again below
    started = time.perf_counter()
    model = loaded_model(folder, config, device, recipe)
    seconds = time.perf_counter() - started
    began = time.perf_counter()
    if kept:
        _keep(model, kept, seconds)
    return model, began - time.perf_counter()  # negative: takes the time of saving out of the caller's loading time


def _kept(kept: Path, config: Any, device: torch.device, recipe: Recipe) -> Any:
    """The model from its stored quantised weights, with this recipe's compute dtype."""
    stored = type(config).from_pretrained(kept)  # says how the weights are quantised
    for name in ("use_cache", "problem_type"):
        setattr(stored, name, getattr(config, name))
    model = loaded_model(kept, stored, device, replace(recipe, quantization=None))
    keep_layout(model)
    compute = getattr(quantization(config, recipe, ()), "bnb_4bit_compute_dtype", None)  # torchao has none
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.compute_dtype = compute
            module.compute_type_is_set = True
    return model


def _keep(model: Any, kept: Path, seconds: float) -> None:
    """Save to a temporary folder and rename it, so that a stored model is always complete.

    Where saving fails, for instance because the disk is full, nothing is stored, and the next trial quantises again.
    """
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{kept.name}.", dir=kept.parent))
    try:
        with torch.no_grad():
            model.save_pretrained(partial)
        (partial / BESIDE).write_text(json.dumps({"seconds": seconds, "drawn": getattr(model, "drawn", [])}))
        partial.rename(kept)
    except (OSError, ValueError, SafetensorError):  # no room, another worker was faster, or it cannot be saved
        shutil.rmtree(partial, ignore_errors=True)
