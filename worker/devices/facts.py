"""`python -m worker.devices.facts`: what this machine can measure on, as JSON, one object a device.

Runs in a process of its own, because it imports torch and touches CUDA, and the worker does neither.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

from service.contract.hardware import HardwareFacts, Package
from service.levers import packages as needed_packages
from service.source import version_of
from worker import host
from worker.devices import discover

VERSIONED = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "triton")
USEFUL = ("accelerate", "triton", "datasets")  # beside those that methods and levers need
ROOT = Path(__file__).parents[2]
# What decides how a trial is measured: an update of anything else keeps jobs that are under way on their hardware.
MEASURES = (
    *("training", "worker/child", "worker/devices", "worker/runner"),
    *("service/contract", "service/levers", "service/tasks", "service/recipe.py"),
)
IMPORTED = ("bitsandbytes",)  # present is not enough: its native library has to load


def packages() -> dict[str, Package]:
    """The version of each optional package, or why it cannot be used."""
    found = {}
    for name in dict.fromkeys((*needed_packages(), *USEFUL)):
        if util.find_spec(name) is None:
            found[name] = Package(problem="not installed")
            continue
        try:
            version = metadata.version(name.replace("_", "-"))
            if name in IMPORTED:
                import_module(name)
            found[name] = Package(version=version)
        except metadata.PackageNotFoundError:
            found[name] = Package(version="unknown")
        except (ImportError, OSError, RuntimeError) as error:
            found[name] = Package(problem=f"does not import: {error}"[:200])
    return found


def versions() -> dict[str, str]:
    """The versions of all that changes how fast a step is."""
    import torch

    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    found["dynotune"] = version_of(*(ROOT / name for name in MEASURES))
    return found


def commit_of(folder: Path) -> str | None:
    """The commit of the checkout whose top is this folder; None where it is none, as inside another repository."""
    git = ["git", "-C", str(folder), "rev-parse", "--show-toplevel", "--short=12", "HEAD"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    top, _, commit = done.stdout.strip().partition("\n")
    return commit if done.returncode == 0 and Path(top).resolve() == folder.resolve() else None


def all_facts() -> list[HardwareFacts]:
    """The facts of every device of this machine, accelerators before the host."""
    common: dict[str, Any] = {
        "host": platform.node(),
        "cores": host.cores(),
        "versions": versions(),
        "packages": packages(),
        "commit": commit_of(ROOT),
    }
    return [facts for device in discover().values() for facts in device.found(common)]


if __name__ == "__main__":
    sys.stdout.write(json.dumps([facts.model_dump(mode="json") for facts in all_facts()]) + "\n")
