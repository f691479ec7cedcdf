"""`dynotune doctor`: what this machine can run, and what would make it run more."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import psutil
from rich.console import Console
from rich.text import Text

from service import __version__
from service.contract.hardware import HardwareFacts
from service.devices import device_facts
from service.errors import Misconfigured
from service.levers import LEVERS, packages
from service.settings import Settings

# What packages bring that no method and no choice of a lever requires.
BESIDES = {"accelerate": "loading straight to the device", "triton": "compile on GPUs"}


def report(console: Console, as_json: bool) -> int:
    """Print the report; 0 when something can be measured here, else 1."""
    settings = Settings.from_environment()
    found, problem = list[HardwareFacts](), None
    try:
        found = device_facts()
    except Misconfigured as error:
        problem = f"Nothing can be measured here: {error.detail}"
    disk = shutil.disk_usage(settings.home).free
    if as_json:
        data: dict[str, Any] = {
            "dynotune": __version__,
            "home": str(settings.home),
            "database": named(settings.database_url),
            "free_disk_bytes": disk,
            "devices": [facts.model_dump(mode="json") for facts in found],
            "problem": problem,
        }
        print(json.dumps(data, indent=2))
        return 0 if found else 1
    console.print(f"dynotune {__version__}, state in {settings.home} ({disk / 2**30:.0f} GiB free)")
    if problem:
        console.print(problem, style="red", soft_wrap=True)
        return 1
    for facts in found:
        _device(console, facts)
    versions = ", ".join(f"{name} {version}" for name, version in found[0].versions.items())
    console.print(f"versions: {versions}")
    needed = packages()
    for name, package in found[0].packages.items():
        state = package.version or Text(str(package.problem), "yellow")
        brings = ", ".join(needed.get(name, ())) or BESIDES.get(name, "nothing dynotune uses")
        console.print(Text.assemble(f"  {name}: ", state, f" - brings {brings}"), soft_wrap=True)
    return 0


def named(url: str) -> str:
    """The database that a URL names, without secrets: a password may be in the URL's query too."""
    from sqlalchemy import URL, make_url  # imported here, as it takes long
    from sqlalchemy.exc import ArgumentError

    try:
        found = make_url(url)
    except (ArgumentError, ValueError):
        return "no URL of a database"
    kind = found.get_backend_name()
    return URL.create(kind, host=found.host, port=found.port, database=found.database).render_as_string()


def _device(console: Console, facts: HardwareFacts) -> None:
    bf16 = "bf16 in hardware" if facts.bf16_native else "bf16 emulated"
    memory = facts.memory_bytes / 2**30
    driver = f", driver {facts.driver}" if facts.driver else ""
    about = f" {facts.name}: {memory:.1f} GiB, {facts.cores} cores, {bf16}{driver}"
    console.print(Text.assemble((f"{facts.device}:{facts.index}", "bold"), about))
    for other in facts.others:
        console.print(f"  {other}", style="yellow")
    for user in _users(facts) if facts.has_own_memory else ():
        console.print(f"  {user}", style="yellow")
    if facts.topology:
        console.print(facts.topology)
    for lever in LEVERS.values():
        for choice in lever.choices:
            if why := choice.missing(facts):
                console.print(f"  not searched: {lever.name}={choice.name}: {why}")


def _users(facts: HardwareFacts) -> list[str]:
    """The processes on a GPU, with their users and memory. Empty where the driver does not tell."""
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = []
    for uuid, pid, name, memory in (line.split(", ", 3) for line in lines if line.count(", ") >= 3):
        if facts.uuid and facts.uuid in uuid:
            try:
                owner = psutil.Process(int(pid)).username()
            except (psutil.Error, ValueError):
                owner = "an unknown user"
            found.append(f"process {pid} of {owner} uses {memory}: {name}")
    return found
