"""`python -m worker.devices.facts`: what this machine can measure on, as JSON, one object a device.

Runs in a process of its own, because it imports torch and touches CUDA, and the worker does neither.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

import psutil

from service.contract.hardware import HardwareFacts, Package

VERSIONED = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "triton")
OPTIONAL = (
    *("peft", "bitsandbytes", "accelerate", "triton", "flash_attn", "flash_attn_interface", "liger_kernel"),
    *("cut_cross_entropy", "torchao", "apex", "galore_torch", "torchdistx", "datasets", "sacrebleu", "rouge_score"),
)
IMPORTED = ("bitsandbytes",)  # present is not enough: its native library has to load


def packages() -> dict[str, Package]:
    """Optional packages: version, or why they cannot be used."""
    found = {}
    for name in OPTIONAL:
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
    """Versions that change timings."""
    import torch

    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if commit := _commit():
        found["dynotune-commit"] = commit
    return found


def _commit() -> str | None:
    """The checkout's commit, when this is one."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cpu_facts(common: dict[str, Any]) -> HardwareFacts:
    """The host's CPU."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    fields = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    load, cores = os.getloadavg()[0], common["cores"]
    flags = fields.get("flags", fields.get("Features", "")).split()
    return HardwareFacts(
        device="cpu",
        name=f"{fields.get('model name', platform.machine())} ({torch.backends.cpu.get_cpu_capability()})",
        memory_bytes=psutil.virtual_memory().total,
        others=(f"load average {load:.1f} on {cores} cores",) if load > 0.5 else (),
        bf16_native=any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "bf16")),
        **common,
    )


def cuda_facts(common: dict[str, Any]) -> list[HardwareFacts]:
    """Every visible GPU."""
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        others = (f"{(total - free) / 2**30:.1f} GiB in use by others",) if total - free > 1 << 30 else ()
        capability = (properties.major, properties.minor)
        found.append(
            HardwareFacts(
                device="cuda",
                index=index,
                uuid=str(properties.uuid) if hasattr(properties, "uuid") else None,
                name=properties.name,
                memory_bytes=total,
                capability=capability,
                bf16_native=capability >= (8, 0),
                driver=_smi("--query-gpu=driver_version", "--format=csv,noheader"),
                topology=_smi("topo", "-m") if torch.cuda.device_count() > 1 else None,
                others=others,
                **common,
            )
        )
    return found


def _smi(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (
        done.stdout.strip().splitlines()[0]
        if "topo" not in arguments and done.stdout.strip()
        else done.stdout.strip() or None
    )


def all_facts() -> list[HardwareFacts]:
    """GPUs first, then the CPU."""
    import torch

    common: dict[str, Any] = {
        "host": platform.node(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": versions(),
        "packages": packages(),
    }
    gpus = cuda_facts(common) if torch.cuda.is_available() else []
    return [*gpus, cpu_facts(common)]


if __name__ == "__main__":
    sys.stdout.write(json.dumps([facts.model_dump(mode="json") for facts in all_facts()]) + "\n")
