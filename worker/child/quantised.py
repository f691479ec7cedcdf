"""Quantised weights are kept on the worker: the first trial of a model quantises them, later ones load them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

TIMES = "dynotune.json"


@dataclass(frozen=True)
class Asked:
    """What is to be quantised and how; `rest` names what else the weights depend on, such as the seed of a head."""

    folder: Path
    quantization: Any
    rest: str

    @property
    def key(self) -> str:
        """Twelve hex digits of the weights' files and all that makes them what they are."""
        files = sorted((*self.folder.glob("*.safetensors"), *self.folder.glob("*.bin"), self.folder / "config.json"))
        marks = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        arguments = {name: str(value) for name, value in sorted(self.quantization.to_dict().items())}
        arguments.pop("bnb_4bit_compute_dtype", None)  # of the arithmetic, not of the weights
        made_by = [_version(name) for name in ("transformers", "bitsandbytes", "torchao", "torch")]
        text = json.dumps([str(self.folder.resolve()), marks, arguments, self.rest, made_by], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def load(kind: Any, asked: Asked, options: dict[str, Any], store: Path | None) -> tuple[Any, float]:
    """(the quantised model, the seconds that it would have taken more to quantise it); the libraries' errors pass."""
    kept = store / asked.key if store else None
    if kept and (kept / TIMES).exists():
        started = time.perf_counter()
        try:
            model = _kept(kind, kept, asked, options)
            os.utime(kept)  # still in use: see worker/runner/pruning.py
            seconds = float(json.loads((kept / TIMES).read_text())["seconds"])
            return model, max(0.0, seconds - (time.perf_counter() - started))
        except (OSError, ValueError, KeyError, SafetensorError):
            shutil.rmtree(kept, ignore_errors=True)  # broken, or half pruned: it is made anew
    started = time.perf_counter()
    model = kind.from_pretrained(asked.folder, quantization_config=asked.quantization, **options)
    seconds = time.perf_counter() - started
    began = time.perf_counter()
    if kept:
        _keep(model, kept, seconds)
    return model, began - time.perf_counter()  # what keeping took is not the load's


def _kept(kind: Any, kept: Path, asked: Asked, options: dict[str, Any]) -> Any:
    """The model from its kept weights, with this configuration's compute dtype."""
    changed = {name: value for name, value in options.items() if name != "config"}
    config = options["config"]
    stored = type(config).from_pretrained(kept)
    for name in ("use_cache", "pad_token_id"):
        setattr(stored, name, getattr(config, name))
    model = kind.from_pretrained(kept, config=stored, **changed)
    compute = getattr(asked.quantization, "bnb_4bit_compute_dtype", None)  # torchao has none
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.compute_dtype = compute
            module.compute_type_is_set = True
    return model


def _keep(model: Any, kept: Path, seconds: float) -> None:
    """Save beside and rename, so that what is there is whole; a disk that is full keeps nothing."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{kept.name}.", dir=kept.parent))
    try:
        with torch.no_grad():
            model.save_pretrained(partial)
        (partial / TIMES).write_text(json.dumps({"seconds": seconds}))
        partial.rename(kept)
    except (OSError, ValueError, SafetensorError):  # no room, another worker was faster, or it cannot be saved
        shutil.rmtree(partial, ignore_errors=True)
