"""What a run takes on a CPU, by how many kernels torch's libraries keep for shapes that they met (decision 0026).

    python -m benchmarks.kernels_kept [--precision bf16-mixed] [--micro 4] [--json FILE]

The soak of one of the demo's fast configurations (40 steps of batches of many lengths), once for each setting, in a
process of its own without a memory cap: its peak, and its seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.packing import candidate
from service.cli.jobfile import read_job
from service.contract.child import RunSoak, Workplace
from service.contract.job import JobSpec
from worker.runner.main import environment

ROOT = Path(__file__).parent.parent
CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # oneDNN's, and that of torch's layer over it
SETTINGS = ((1024, 1024), (128, 1024), (128, 128))  # the libraries' own, and what a trial sets, one after the other
FAST = {"attention": "eager", "head": "chunked", "batching": "grouped", "projections": "fused"}
LIMIT_SECONDS = 1800.0


def soaked(precision: str, micro: int) -> dict[str, float]:
    """The peak in GiB and the seconds of the soak, in this process."""
    from worker.child.soak import run_soak
    from worker.devices import open_device

    os.chdir(ROOT)
    spec = JobSpec.model_validate(read_job(Path("examples/functions-lora.yaml")))
    device = open_device("cpu", 0)
    device.limit(None)
    place = Workplace(device="cpu", data_roots=(ROOT,), hub_cache=ROOT)
    began = time.perf_counter()
    chosen = candidate(FAST | {"precision": precision}, micro)
    found = run_soak(RunSoak(workplace=place, spec=spec, candidate=chosen, seed=7, seconds=LIMIT_SECONDS), device)
    return {"peak_gib": (found.peak_bytes or 0) / 2**30, "seconds": time.perf_counter() - began, "steps": found.steps}


def main() -> None:
    """Run every setting, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(soaked(options.precision, options.micro)))
        return
    rows: list[dict[str, Any]] = []
    command = [sys.executable, "-m", "benchmarks.kernels_kept", "--here", "--precision", options.precision]
    for kept in SETTINGS:
        told = dict(zip(CACHES, map(str, kept), strict=True))
        done = subprocess.run(
            [*command, "--micro", str(options.micro)], env=environment() | told, stdout=subprocess.PIPE, check=True
        )
        rows.append({"kept": kept} | json.loads(done.stdout.splitlines()[-1]))
        print(f"{kept[0]:5} {kept[1]:5}  {rows[-1]['peak_gib']:.2f} GiB  {rows[-1]['seconds']:.0f} s", flush=True)
    if options.json:
        machine = {"cores": os.cpu_count(), "os": platform.platform()}
        found = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "precision": options.precision, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
