"""Finds models and datasets: a local folder below the allowed roots, or the hub (its cache when offline)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from service.contract.child import Workplace
from service.contract.job import DatasetSpec, ModelSpec
from service.contract.paths import looks_local, outside
from service.model_folder import config_of, refused_code, refused_weights
from service.rows import ENDINGS
from training.errors import TrainingError
from training.source import downloaded
from worker.child.hub_configurations import CARD, HubConfiguration, configuration_of

LEAST_FREE = 1 << 30  # bytes that a download leaves free
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def model_folder(model: ModelSpec, workplace: Workplace) -> Path:
    """The model's folder; TrainingError when it is unknown, or holds code or pickles that are not allowed."""
    patterns = ["*.json", "*.txt", "*.model", "*.jinja", "*.py"]
    if model.weights == "pretrained":
        patterns += ["*.safetensors", *(["*.bin"] if workplace.allow_pickle else [])]
    local_folder = _local(model.source, "model.source", workplace)
    folder = local_folder or _hub(model.source, model.revision, "model", patterns)
    try:
        config = config_of(folder, model.source)
    except ValueError as error:
        raise TrainingError(str(error)) from error
    if sentence := refused_code(config, model.source, workplace.allow_remote_code):
        raise TrainingError(sentence)
    refused = refused_weights(folder, model.source, workplace.allow_pickle, from_hub=local_folder is None)
    if model.weights == "pretrained" and refused is not None:
        raise TrainingError(refused[1])
    return folder


def dataset_files(dataset: DatasetSpec, workplace: Workplace) -> tuple[Path, HubConfiguration]:
    """(the dataset's file or folder, which of its files are read); TrainingError when it is unknown."""
    local = _local(dataset.source, "dataset.source", workplace)
    folder = local or _hub(dataset.source, dataset.revision, "dataset", [CARD])
    found = configuration_of(folder, dataset)
    if local is None:
        train, validation = found.of_splits(dataset.splits)
        patterns = downloaded((*train, *validation), found.below, ENDINGS)
        folder = _hub(dataset.source, dataset.revision, "dataset", patterns)
    return folder, found


def commit_of(folder: Path) -> str | None:
    """The commit of a snapshot in the hub's cache; None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" else None


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
        if sentence := outside(field, source, file, roots):
            raise TrainingError(sentence)
    return path


# A model's second copies of its weights: in folders for other programs, and Mistral's and Meta's own formats.
OTHER_COPIES = ["*/*.safetensors", "*/*.bin", "consolidated*"]


def _hub(source: str, revision: str | None, kind: str, patterns: list[str]) -> Path:
    """The folder of a hub model's or dataset's snapshot, downloaded if it is not in the cache."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    where = f"{source}@{revision}" if revision else source
    ignored = OTHER_COPIES if kind == "model" else None
    try:
        _check_room(source, revision, kind, patterns, ignored)
        found = snapshot_download(
            source,
            revision=revision,
            repo_type=kind,
            allow_patterns=patterns,
            ignore_patterns=ignored,
            local_files_only=constants.HF_HUB_OFFLINE,  # of a commit, huggingface_hub 1 asks the hub all the same
        )
        return Path(found)
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


def _check_room(source: str, revision: str | None, kind: str, patterns: list[str], ignored: list[str] | None) -> None:
    """TrainingError where what is not in the cache yet does not fit on the cache's disk."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    try:
        found: Any = HfApi().repo_info(source, repo_type=kind, revision=revision, files_metadata=True)
        listed = found.siblings or []
    except Exception:  # noqa: BLE001 - offline, or refused: then the download says why
        return
    wanted = filter_repo_objects(
        listed, allow_patterns=patterns, ignore_patterns=ignored, key=lambda one: one.rfilename
    )
    cache = Path(constants.HF_HUB_CACHE)
    blobs = cache / repo_folder_name(repo_id=source, repo_type=kind) / "blobs"
    missing = sum(one.size or 0 for one in wanted if not (blobs / _blob(one)).exists())
    disk = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if missing > (free := shutil.disk_usage(disk).free - LEAST_FREE):
        raise TrainingError(
            f"{kind}.source: {source} has {missing / 1e9:.1f} GB to download, and the disk of the hub's cache, {disk}, "
            f"has room for {max(0, free) / 1e9:.1f} GB; free some, or set HF_HOME to a larger disk on the worker"
        )


def _blob(file: Any) -> str:
    """The name under which the hub's cache keeps a file: its hash."""
    return str(file.lfs.sha256 if file.lfs else file.blob_id)
