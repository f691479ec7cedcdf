"""The published tables, reproduced on this device, side by side with the published ratios.

    python -m benchmarks.seed_tables [--size tiny|full] [--table NAME ...] [--quick] [--speed-only] [--seconds N]
        [--home FOLDER] [--json FILE]

Models are drawn at random in the published shapes (`--size full`) or much smaller (`tiny`, under 10 minutes on 2
cores), data come from Python's own library: ratios are to be compared, not figures. A row that this device cannot run
says why; on a CPU, which has no fp16 autocast, bf16 stands for it, and at the size `tiny` aot_eager for inductor,
whose code takes a minute or two a row to make. Rows that were done are kept in --home: a run that was cut off goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks.published.generation import generate
from benchmarks.published.jobs import SIZES, WEIGHTS, Size, configuration, job, prepare
from benchmarks.published.tables import TABLES, Row, Table
from benchmarks.store import Store
from service.contract.child import Result, RunSoak, Workplace
from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Outcome
from service.contract.states import Origin
from service.contract.task import TrialRequest
from service.devices import device_facts
from service.levers import LEVERS, circumstances, excluded
from worker.runner.main import environment, read_facts
from worker.runner.measuring import Bench, measure
from worker.runner.sandbox import Sandbox

ROOT = Path(__file__).parent.parent
SECONDS = 900.0
LEARNT = 0.3  # accuracy of the first row from which on others can be compared: twice what guessing gives
RUN_STEPS, STEPS_AN_EVALUATION = 1000, 1000
LOSS_ABOVE = 0.05  # of the first row's last loss
WORSE = 0.03  # accuracy below the first row's that counts as unstable

Found = dict[str, Any]
SHOWN = (("accuracy", ".3f"), ("wall", ".0f"))


def unavailable(table: Table, made: Configuration, spec: JobSpec, facts: HardwareFacts) -> str | None:
    """Why a row cannot run here, or None."""
    for name, choice in made.levers.items():
        if missing := LEVERS[name].choice(choice).missing(facts, asked=True):
            return f"{name}={choice} {missing}"
    clash = excluded({**made.levers, **circumstances(spec, table.method)})
    return clash.reason if clash else None


def run(bench: Bench, table: Table, row: Row, size: Size, speed_only: bool) -> Found:
    """One row, measured as a trial, then trained a little and evaluated, unless its speed is all that is wanted."""
    made = configuration(table, row, size, bench.facts.device)
    spec = job(table, row, size, bench.home, bench.facts.device)
    if reason := unavailable(table, made, spec, bench.facts):
        return {"name": row.name, "reason": reason}
    request = TrialRequest(
        configuration=made,
        origin=Origin.baseline,
        number=1,
        passes=1 if table.shows == "memory" or size.divide > 1 else 2,
        seconds_limit=SECONDS,
        confirm_largest=row.batch is None,
    )
    found, _ = measure(bench, spec, table.name, request, lambda _: None, lambda: False, None)
    assert found is not None, "nobody ends it from outside"
    if found.outcome is not Outcome.ok or found.timing is None:
        return {"name": row.name, "reason": f"{found.outcome}: {found.reason}", "failed": True}
    timing = found.timing
    return {
        "name": row.name,
        "samples_per_second": timing.samples / timing.seconds,
        "tokens_per_second": timing.tokens / timing.seconds,
        "batch": found.micro_batch_size,
        "rate": row.rate,
        "peak_bytes": found.peak_bytes,
        "once_seconds": found.once_seconds,
        "share_clean": timing.clean_share,
        **({} if speed_only else trained(bench, table, row, found, spec)),
    }


def trained(bench: Bench, table: Table, row: Row, found: Measurement, spec: Any) -> Found:
    """Accuracy after the size's steps, whether every loss was finite, and for the ladder the whole run's seconds."""
    if table.shows != "speed":
        return {}
    # Under a name of its own: two rows may be one configuration, and a soak goes on where its like has stopped.
    name = f"{table.name}-{table.rows.index(row)}"
    request = RunSoak(workplace=bench.workplace_of(name), spec=spec, candidate=found, seed=1, seconds=SECONDS)
    started = time.perf_counter()
    ending = bench.sandbox.run(request, SECONDS, lambda _: None, lambda: False)
    if not isinstance(ending.last, Result) or ending.last.soak is None:
        return {"unstable": ending.reason, "accuracy": None}
    held = ending.last.soak
    wall = time.perf_counter() - started
    if table.task != "causal-lm":
        return {"accuracy": held.evaluation_accuracy, "last_loss": held.last_loss, "wall": wall}
    assert found.timing is not None and held.evaluation_seconds is not None
    loading = found.time_spent["load"] if row.kept else found.load_seconds
    steps = RUN_STEPS / found.timing.steps * found.timing.seconds
    evaluations = RUN_STEPS // STEPS_AN_EVALUATION * held.evaluation_seconds
    return {"whole": loading + steps + evaluations, "evaluation_seconds": held.evaluation_seconds}


def show(table: Table, rows: list[Found]) -> None:
    """Print a table beside what was published; `wall` is a training of the size's steps, load and evaluation in it."""
    print(f"\n{table.title}")
    ratio = "of samples/s" if table.shows == "speed" else "of peak"
    head = (
        f"{'':38} {'batch':>5} {'rate':>7} {'samples/s':>9} {'peak MiB':>8} {'wall s':>6} {ratio:>12} {'published':>9}"
    )
    print(f"{head} {'accuracy':>8}  stable (published)")
    first = next((one for one in rows if "reason" not in one), None)
    for row, one in zip(table.rows, rows, strict=True):
        published = f"{row.published:.2f}" if row.published else "-"
        if "reason" in one or first is None:
            print(f"{row.name:38} {'':>52} {published:>9}  {one.get('reason', '')[:100]}")
            continue
        key = "samples_per_second" if table.shows == "speed" else "peak_bytes"
        accuracy, wall = (f"{one[name]:{form}}" if one.get(name) is not None else "-" for name, form in SHOWN)
        said = "" if row.stable is None else f" ({'yes' if row.stable else 'no'})"
        mib = one["peak_bytes"] / 2**20
        figures = f"{one['batch']:5} {one['rate']:7.1e} {one['samples_per_second']:9.1f} {mib:8.0f}"
        ratios = f"{wall:>6} {one[key] / first[key]:12.2f} {published:>9} {accuracy:>8}"
        whole = f"whole run {first['whole'] / one['whole']:.2f}  " if "whole" in one and "whole" in first else ""
        print(f"{row.name:38} {figures} {ratios}  {stable(one, first)}{said}  {whole}{row.note}".rstrip())


def stable(one: Found, first: Found) -> str:
    """Whether it learnt as the first row did: `yes`, `no`, or `loss` where so few steps show in the loss only."""
    if "unstable" in one:
        return "no"
    if one.get("last_loss") is None or first.get("last_loss") is None:
        return "-"
    if one["last_loss"] > first["last_loss"] * (1 + LOSS_ABOVE):
        return "no"
    if one.get("accuracy") is None or (first.get("accuracy") or 0.0) < LEARNT:
        return "loss"
    return "yes" if one["accuracy"] >= first["accuracy"] - WORSE else "no"


def show_generation(rows: list[Found]) -> None:
    """Print the formats beside what was published for LLaMA 7B."""
    print("\nGeneration with a causal model (published: LLaMA 7B on an A100)")
    print(f"{'':44} {'tokens/s':>10} {'ratio':>6} {'published':>9} {'peak MiB':>9}")
    base = next((row for row in rows if "reason" not in row), None)
    for row in rows:
        if "reason" in row or base is None:
            print(f"{row['name']:44} {row.get('reason', '')[:100]}")
            continue
        published = f"{row['published'][0] / 11.47:.2f}" if row["published"] else "-"
        ratio = row["tokens_per_second"] / base["tokens_per_second"]
        speed, peak = row["tokens_per_second"], row["peak_bytes"] / 2**20
        print(f"{row['name']:44} {speed:10.1f} {ratio:6.2f} {published:>9} {peak:9.1f}")


def main() -> None:
    """Run, print, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--table", nargs="+", choices=[*(table.name for table in TABLES), "generation"], metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="two tables, tiny")
    parser.add_argument("--speed-only", action="store_true", help="train no row, so nothing is said of its stability")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no further row begins")
    parser.add_argument("--home", type=Path, default=ROOT / "dynotune-out" / "seed-tables")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--data", type=Path, help="a folder that examples/stdlib_data.py has written to")
    parser.add_argument("--facts", type=Path, help="a file with the device's facts, which takes seconds to find out")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    os.environ.update(environment())
    facts = read_facts(options.facts) if options.facts else device_facts()[0]
    size = SIZES["tiny" if options.quick else options.size]
    home = (options.home / options.size).resolve()
    prepare(home, size, options.data)
    wanted = options.table or (
        ["lightning", "states"] if options.quick else [*(one.name for one in TABLES), "generation"]
    )
    store = Store(home / "rows.json")
    bench = Bench(
        Sandbox(facts.has_own_memory, capability=facts.capability),
        facts,
        home,
        Workplace(
            device=facts.device,
            index=facts.index,
            data_roots=(home, ROOT),
            hub_cache=home / "hub",
            quantised_weights=home / "quantised",
        ),
    )
    print(f"{facts.name}, {time.strftime('%Y-%m-%d')}, size {options.size}")
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"name": facts.name, "cores": facts.cores, "os": platform.platform(), "versions": facts.versions},
        "size": options.size,
        "tables": {},
    }
    weights = home / WEIGHTS
    if {"predibase", "generation"} & set(wanted) and not (weights / "model.safetensors").exists():
        save(home / "llama", weights)
    for table in TABLES:
        if table.name not in wanted:
            continue
        rows = []
        for row in table.rows:
            # A row that was not trained must not stand for one that is to be.
            key = f"{table.name}/{row.name}{'/speed' if options.speed_only else ''}"
            known = store.get(key)
            if known and known.get("failed"):  # it is tried again
                known = None
            if known is None and time.monotonic() > deadline:
                known = {"name": row.name, "reason": "not begun in the seconds that were given"}
            rows.append(known or store.put(key, run(bench, table, row, size, options.speed_only)))
        show(table, rows)
        result["tables"][table.name] = [
            {**one, "published": row.published} for row, one in zip(table.rows, rows, strict=True)
        ]
    if "generation" in wanted:
        rows = generate(weights, 32 if options.size == "tiny" else 256)
        show_generation(rows)
        result["tables"]["generation"] = rows
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def save(source: Path, folder: Path) -> None:
    """A model with random weights, in a process of its own: this one does not import torch."""
    import subprocess
    import sys

    code = (
        "import sys; from transformers import AutoConfig, AutoModelForCausalLM;"
        "AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1])).save_pretrained(sys.argv[2])"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(source), str(folder)], check=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)


if __name__ == "__main__":
    main()
