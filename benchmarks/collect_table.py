"""Measure every valid configuration of a small job, for a recorded surface of benchmarks/search_regret.py.

    python -m benchmarks.collect_table --job llama-lora|bert-full --json FILE [--rounds N]
        [--limit N] [--home FOLDER]

Each is measured once as a trial, in the shortest way. One timing of some seconds scatters by a tenth on a shared
machine, so in rounds after that, groups of configurations take turns with the baseline, as finalists do in a
verification (docs/decisions/0017): their ratios to the baseline tell the truth. The file is written after each trial
and each group, so that a run that was cut off goes on. On an otherwise idle machine with two cores trials take ten
minutes, and a round half an hour. Committed ones lie in benchmarks/surfaces/tables.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.published.jobs import SIZES, Size, config, prepare
from benchmarks.store import say
from benchmarks.surfaces.recorded import Table
from service.contract.child import Result, RunBlock, Workplace
from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement
from service.contract.states import Origin
from service.contract.task import TrialRequest
from service.devices import device_facts
from service.levers import LEVERS
from worker.runner.kept import Keeper
from worker.runner.main import environment
from worker.runner.measuring import Bench, measure
from worker.runner.sandbox import Sandbox

ROOT = Path(__file__).parent.parent
SECONDS = 120.0  # at most, a trial
TOGETHER = 5  # configurations that take turns with the baseline at the same time
PACKAGES = ("peft",)  # that the tables' facts have: with others there are choices that no table could hold all of
# Small, as a work unit has 10,000 tokens at least: a trial shall take seconds.
MODELS = {"decoder": ("llama", Size(128, 4, 4, 256, 0, 1, 1)), "encoder": ("bert", Size(128, 2, 2, 256, 0, 1, 1))}
PLACE = "HOME"  # what stands for the home folder in a table


def job(
    task: str, method: str, model: str, data: str, searched: tuple[str, ...], splits: dict[str, str]
) -> dict[str, Any]:
    """A job that fixes all levers but the searched ones at their baselines, and the precision, as CPUs differ in it."""
    fixed = {name: lever.baseline for name, lever in LEVERS.items() if name not in searched} | {"precision": "fp32"}
    return {
        "model": {"source": model, "weights": "random"},
        "task": task,
        "dataset": {"source": f"{PLACE}/data/{data}.jsonl", "max_length": 256, "splits": splits},
        "method": method,
        "training": {"effective_batch_size": 8, "epochs": 3},
        "search": {"trials": 1000, "minutes": 10_000, "verify": "quick", "fixed": fixed},
    }


JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    "llama-lora": lambda: job(
        "causal-lm", "lora", f"{PLACE}/decoder", "functions", ("attention", "head", "optimizer", "batching"), {}
    ),
    "bert-full": lambda: job(
        "sequence-classification",
        "full",
        f"{PLACE}/encoder",
        "packages",
        ("optimizer", "checkpointing", "batching", "padding"),
        {"column": "split", "train": "train", "validation": "validation"},
    ),
}


def models(home: Path) -> None:
    """Write the models' folders and the data below `home`."""
    prepare(home, SIZES["tiny"])
    for name, (kind, size) in MODELS.items():
        shutil.copytree(home / kind, home / name, dirs_exist_ok=True)
        (home / name / "config.json").write_text(json.dumps(config(kind, size)))


def placed(spec: JobSpec, home: Path) -> JobSpec:
    """The job with the real home folder."""
    return JobSpec.model_validate_json(spec.model_dump_json().replace(PLACE, str(home)))


def anonymous(found: Measurement, home: Path) -> Measurement:
    """A measurement without the home folder's path."""
    return Measurement.model_validate_json(found.model_dump_json().replace(str(home), PLACE))


def trial(bench: Bench, spec: JobSpec, name: str, configuration: Configuration, number: int) -> Measurement:
    """One configuration, measured in the shortest way."""
    request = TrialRequest(
        configuration=configuration,
        origin=Origin.search,
        number=number,
        confirm_largest=False,
        curve=False,
        passes=1,
        seconds_limit=SECONDS,
    )
    found, _ = measure(bench, spec, name, request, lambda _: None, lambda: False, None)
    assert found is not None, "nobody ends it from outside"
    return found


def in_turns(
    bench: Bench, spec: JobSpec, name: str, baseline: Measurement, group: list[Measurement], number: int
) -> dict[str, float]:
    """Configuration's key -> its seconds over the baseline's, where all of the group and the baseline took turns."""
    place, seed = bench.workplace_of(name), 1000 + number
    asked = [
        RunBlock(workplace=place, spec=spec, candidate=one, block=number, seed=seed, in_turns=True)
        for one in (baseline, *group)
    ]
    endings = Keeper(bench.sandbox, lambda: False, None, None).together(asked, [SECONDS] * len(asked))
    blocks = [ending.last.block if isinstance(ending.last, Result) else None for ending in endings]
    seconds = [block.timing.seconds if block and block.timing else math.nan for block in blocks]
    keys = [one.configuration.key for one in group]
    return {key: taken / seconds[0] for key, taken in zip(keys, seconds[1:], strict=True) if taken / seconds[0] > 0}


def recorded_facts(facts: HardwareFacts) -> HardwareFacts:
    """The facts that go with a table: this device without its host's name, and with the tables' packages only."""
    packages = {name: one for name, one in facts.packages.items() if name in PACKAGES}
    return facts.model_copy(update={"host": "recorded", "uuid": None, "others": (), "packages": packages})


def main() -> None:
    """Measure what the table lacks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--job", choices=JOBS, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="trials at most in this call")
    parser.add_argument("--rounds", type=int, default=2, help="how often each takes turns with the baseline")
    parser.add_argument("--home", type=Path, default=ROOT / "dynotune-out" / "tables")
    options = parser.parse_args()
    os.environ.update(environment())
    home = options.home.resolve()
    facts = next(one for one in device_facts() if not one.has_own_memory)
    models(home)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    table = Table(options.json, JobSpec.model_validate(JOBS[options.job]()), recorded_facts(facts))
    folders = Workplace(
        device=facts.device,
        index=facts.index,
        data_roots=(home, ROOT),
        hub_cache=home / "hub",
        quantised_weights=home / "quantised",
    )
    bench = Bench(Sandbox(facts.has_own_memory, capability=facts.capability), facts, home, folders)
    left = table.missing()
    say(f"{len(left)} of {options.job} are left")
    for number, configuration in enumerate(left[: options.limit], 1):
        started = time.perf_counter()
        found = trial(bench, placed(table.spec, home), options.job, configuration, number)
        table.add(anonymous(found, home))
        seconds = f"{found.timing.seconds:.2f} s a unit" if found.timing else found.reason[:100]
        say(f"{number}/{len(left)} {found.outcome} {seconds}, {time.perf_counter() - started:.1f} s")
    if not table.missing():
        spec = placed(table.spec, home)
        for number, group in table.groups(options.rounds, TOGETHER):
            started = time.perf_counter()
            ratios = in_turns(bench, spec, options.job, table.baseline(), group, number)
            table.add_ratios(number, ratios)
            told = " ".join(f"{one:.3f}" for one in ratios.values())
            say(f"round {number + 1}: {told}, {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
