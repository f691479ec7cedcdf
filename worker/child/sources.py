"""Finds models and datasets: a local folder below the allowed roots, or the hub (its cache when offline)."""

from __future__ import annotations

import json
from pathlib import Path

from service.contract.child import Workplace
from service.contract.job import DatasetSpec, ModelSpec
from service.contract.paths import looks_local, outside
from training.errors import TrainingError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def model_folder(model: ModelSpec, workplace: Workplace) -> Path:
    """The model's folder; TrainingError when it is unknown, or holds code or pickles that are not allowed."""
    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
    patterns += ["*.bin"] if workplace.allow_pickle else []
    folder = _local(model.source, "model.source", workplace) or _hub(model.source, model.revision, "model", patterns)
    if not (folder / "config.json").is_file():
        raise TrainingError(f"model.source: {model.source} has no config.json, so it is not a model folder")
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise TrainingError(f"model.source: the config.json of {model.source} is not JSON") from error
    if not isinstance(config, dict):
        raise TrainingError(f"model.source: the config.json of {model.source} is not a JSON object")
    if "auto_map" in config and not workplace.allow_remote_code:
        raise TrainingError(
            f"model.source: {model.source} runs its own code (trust_remote_code), which this server does not allow; "
            "DYNOTUNE_ALLOW_REMOTE_CODE=1 on the server would"
        )
    if model.weights == "pretrained" and not any(folder.glob("*.safetensors")):
        if not any(folder.glob("*.bin")):
            raise TrainingError(
                f"model.source: {model.source} holds no weights; say weights: random to measure with drawn ones"
            )
        if not workplace.allow_pickle:
            raise TrainingError(
                f"model.source: {model.source} has weights as pickle (.bin) only, which can run code when loaded; "
                "convert them to safetensors, or set DYNOTUNE_ALLOW_PICKLE=1 on the server"
            )
    return folder


def dataset_path(dataset: DatasetSpec, workplace: Workplace) -> Path:
    """The dataset's file or folder; TrainingError when it is unknown."""
    patterns = ["*.jsonl", "*.json", "*.csv", "*.parquet"]
    local = _local(dataset.source, "dataset.source", workplace)
    return local or _hub(dataset.source, dataset.revision, "dataset", patterns)


def chat_template(dataset: DatasetSpec, workplace: Workplace) -> str | None:
    """The text of the job's own chat template; None where it has none."""
    if dataset.template_file is None:
        return CHATML if dataset.chat_template == "chatml" else dataset.chat_template
    path = _local(dataset.template_file, "dataset.chat_template", workplace)
    if path is None:
        raise TrainingError(f"dataset.chat_template: {dataset.template_file} does not exist on the worker")
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"dataset.chat_template: {dataset.template_file} cannot be read: {error}") from error


def local(source: str, workplace: Workplace) -> Path:
    """The path that `source` stands for if it is a path; it need not exist."""
    return workplace.roots.resolve(source)


def _local(source: str, field: str, workplace: Workplace) -> Path | None:
    """The file or folder if the source is a path that exists, or None if it may be a hub id.

    TrainingError when a local path does not exist, or when the path or a file below it is outside the allowed roots.
    """
    roots, path = workplace.roots, local(source, workplace)
    if not path.exists():
        if looks_local(source):
            raise TrainingError(f"{field}: {source} does not exist on the worker")
        return None
    # Files below the path are checked too, because a symbolic link in an allowed folder may lead out of it.
    for file in (path, *path.rglob("*")):
        if sentence := outside(field, file, roots):
            raise TrainingError(sentence)
    return path


def _hub(source: str, revision: str | None, kind: str, patterns: list[str]) -> Path:
    """The folder of a hub model's or dataset's snapshot, downloaded if it is not in the cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    where = f"{source}@{revision}" if revision else source
    try:
        return Path(snapshot_download(source, revision=revision, repo_type=kind, allow_patterns=patterns))
    except HFValidationError as error:
        raise TrainingError(f"{kind}.source: {source!r} is neither a path that exists nor a hub id") from error
    except LocalEntryNotFoundError as error:
        raise TrainingError(
            f"{kind}.source: {where} is not in the hub's cache, and the hub cannot be reached from the worker"
        ) from error
    except HfHubHTTPError as error:
        raise TrainingError(
            f"{kind}.source: the hub has no {kind} {where}, or it needs a token (HF_TOKEN on the worker)"
        ) from error
