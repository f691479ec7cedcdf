"""What a model's folder must hold before it is loaded: a config.json, no code that is not allowed, and weights.

The control plane checks the folders that it can see. The worker checks all of them, those from the hub included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def config_of(folder: Path, source: str) -> dict[str, Any]:
    """The folder's config.json; ValueError, whose text is a sentence, where it is missing or no JSON object."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"model.source: {source} has no config.json, so it is not a model folder")
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"model.source: the config.json of {source} is not JSON") from error
    if not isinstance(config, dict):
        raise ValueError(f"model.source: the config.json of {source} is not a JSON object")
    return config


def refused_code(config: Mapping[str, Any], source: str, allow_remote_code: bool) -> str | None:
    """A sentence where the model runs code of its own, which is not allowed."""
    if "auto_map" not in config or allow_remote_code:
        return None
    return (
        f"model.source: {source} runs its own code (trust_remote_code), which this server does not allow; "
        "DYNOTUNE_ALLOW_REMOTE_CODE=1 on the server would"
    )


def refused_weights(folder: Path, source: str, allow_pickle: bool, from_hub: bool = False) -> tuple[str, str] | None:
    """(the field of the job that is wrong, a sentence) where the folder holds no weights that may be read.

    Pickles are not downloaded from the hub where they are not allowed, so there they may be what is missing.
    """
    if any(folder.glob("*.safetensors")):
        return None
    if not any(folder.glob("*.bin")):
        pickles = ", or none but pickles, which DYNOTUNE_ALLOW_PICKLE=1 would allow"
        return "model.weights", (
            f"model.source: {source} holds no weights{pickles if from_hub and not allow_pickle else ''}; "
            "say weights: random to measure with drawn ones"
        )
    if allow_pickle:
        return None
    return "model.source", (
        f"model.source: {source} has weights as pickle (.bin) only, which can run code when loaded; "
        "convert them to safetensors, or set DYNOTUNE_ALLOW_PICKLE=1 on the server"
    )
