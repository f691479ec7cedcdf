"""Is the demo's recommendation any good? It against six hand-made configurations, its baseline, and its own scripts.

    python -m benchmarks.demo_check [--recommendation FILE] [--blocks 5] [--quick] [--script] [--exports NAME ...]
                                    [--json FILE]

Runs `make demo`'s job first when no recommendation is given. In every block the recommendation takes turns of about two
seconds with each of the others, both alive at once, on the same samples with the block's seed: machines are shared, and
what slows one slows the other. A ratio is the median over the blocks. `--script` compares with exported scripts only:
train.py, and with `--exports` also `trainer` and, where TRL is installed, `trl` (benchmarks/script_turns.py).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.script_turns import TRAIN, compared
from service.contract.child import Result, RunBlock, Workplace
from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Block, Measurement, Outcome
from service.contract.recommendation import Recommendation
from service.devices import device_facts
from service.exports import EXPORTS
from service.recommend import as_verified
from service.settings import Settings
from worker.plan.ratios import ratio
from worker.runner.kept import Keeper
from worker.runner.lock import DeviceLock
from worker.runner.main import environment
from worker.runner.measuring import Bench
from worker.runner.sandbox import Sandbox

ROOT = Path(__file__).parent.parent
# What somebody with experience would set by hand on a CPU: levers that differ from the baseline, micro batch.
HAND_MADE: dict[str, tuple[dict[str, str], int]] = {
    "padded, micro batch 6": ({"batching": "padded"}, 6),
    "grouped, micro batch 4": ({"batching": "grouped"}, 4),
    "grouped, micro batch 8": ({"batching": "grouped"}, 8),
    "sorted, micro batch 4": ({"batching": "sorted"}, 4),
    "packed, 1 row": ({"batching": "packed"}, 1),
    "grouped, micro batch 8, eager": ({"batching": "grouped", "attention": "eager"}, 8),
}


def recommendation(path: Path | None) -> Recommendation:
    """The recommendation to check; the demo is run when there is none yet."""
    if path is None:
        path = ROOT / "dynotune-out" / "recommendation.json"
        subprocess.run(
            [sys.executable, "-m", "service.cli", "tune", "examples/functions-lora.yaml"], cwd=ROOT, check=True
        )
    return Recommendation.model_validate_json(path.read_text())


def candidates(found: Recommendation, facts: HardwareFacts) -> dict[str, Measurement]:
    """Name -> what a block needs to know: a configuration and its micro batch."""
    baseline = found.evidence.baseline
    assert baseline is not None, "the demo's baseline did not run"
    made = {"baseline": baseline}
    best_precision = "bf16-mixed" if facts.bf16_native else "fp32"
    for name, (levers, micro) in HAND_MADE.items():
        chosen = baseline.configuration.levers | {"precision": best_precision} | levers
        configuration: Configuration = baseline.configuration.model_copy(
            update={"levers": chosen, "micro_batch_size": micro}
        )
        # The score of a run needs the count of rows, which is the same for all.
        made[name] = Measurement(
            configuration=configuration, outcome=Outcome.ok, micro_batch_size=micro, dataset=baseline.dataset
        )
    return made


def opened(facts: HardwareFacts) -> tuple[Bench, DeviceLock]:
    """A bench as a worker's, and the device's lock, which is held; exits when a worker holds it."""
    settings, home = Settings.from_environment(), Path(tempfile.mkdtemp(prefix="dynotune-check-"))
    lock = DeviceLock(settings.lock_folder, facts.lock_name)
    if not lock.acquire():
        sys.exit("a worker is measuring on this device; stop it first")
    roots = (*settings.data_roots, ROOT)
    place = Workplace(device=facts.device, index=facts.index, data_roots=roots, hub_cache=settings.hub_cache)
    return Bench(Sandbox(facts.has_own_memory, capability=facts.capability), facts, home, place), lock


def run(found: Recommendation, blocks: int, exports: list[str], only_scripts: bool) -> dict[str, Any]:
    """All blocks; the result as JSON."""
    spec = JobSpec.model_validate(found.spec)
    facts = device_facts()[0]
    bench, lock = opened(facts)
    ours, others = as_verified(found), {} if only_scripts else candidates(found, facts)
    scripts = {name: bench.home / EXPORTS[name].file for name in exports}
    for name, script in scripts.items():
        script.write_text(EXPORTS[name].write(found), encoding="utf-8")
    seen: dict[str, list[Block]] = {name: [] for name in others}
    of_scripts: list[dict[str, dict[str, float]]] = []
    rng = random.Random(0)

    def asked(candidate: Measurement, number: int) -> RunBlock:
        place, seed = bench.workplace_of("check"), 1000 + number
        return RunBlock(workplace=place, spec=spec, candidate=candidate, block=number, seed=seed, in_turns=True)

    for number in range(blocks):
        for name in rng.sample(list(others), len(others)):
            pair = [asked(ours, number), asked(others[name], number)]
            endings = Keeper(bench.sandbox, lambda: False, lock.fd, None).together(pair, [900.0, 900.0])
            made = [ending.last.block for ending in endings if isinstance(ending.last, Result) and ending.last.block]
            seen[name] += made if len(made) == 2 else []
            said = " / ".join(f"{speed(block):,.0f}" for block in made) if len(made) == 2 else endings[1].reason
            print(f"block {number + 1}  recommended / {name:32} {said} tokens/s", flush=True)
        of_scripts.append(compared(bench, asked(ours, number), scripts, ROOT, lock.fd))
        speeds = " / ".join(f"{value:,.0f}" for value in of_scripts[-1]["tokens_per_second"].values())
        print(f"block {number + 1}  recommended / {' / '.join(scripts):32} {speeds} tokens/s", flush=True)
    lock.release()
    return summary(found, facts, others, seen, of_scripts)


def speed(block: Block) -> float:
    """Non-padding tokens a second of a block."""
    return block.timing.tokens / block.timing.seconds if block.timing else 0.0


def summary(
    found: Recommendation,
    facts: HardwareFacts,
    others: dict[str, Measurement],
    seen: dict[str, list[Block]],
    of_scripts: list[dict[str, dict[str, float]]],
) -> dict[str, Any]:
    """The recommendation's speed over each of the others, and whether the claimed speed-up holds."""
    spec, ours = JobSpec.model_validate(found.spec), as_verified(found)
    spec = spec.model_copy(update={"search": spec.search.model_copy(update={"objective": "throughput"})})
    ratios = {name: ratio(spec, tuple(seen[name]), ours, other) for name, other in others.items()}
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"name": facts.name, "cores": facts.cores, "os": platform.platform(), "versions": facts.versions},
        "recommended": ours.configuration.model_dump(mode="json"),
        "micro_batch_size": found.configuration.micro_batch_size,
        "times_as_fast_as": {name: found and list(found) for name, found in ratios.items()},
        "tokens_per_second": {name: [speed(block) for block in blocks] for name, blocks in seen.items()},
        "failed": [name for name, one in ratios.items() if one is None],
        "scripts": {name: of_script(name, found, of_scripts) for name in of_scripts[0]["first_loss"]},
    }
    by_hand = {name: one[0] for name, one in ratios.items() if one and name in HAND_MADE}
    against = ratios.get("baseline")
    if not by_hand or not against:
        return result
    best = min(by_hand, key=lambda name: by_hand[name])
    claimed, evidence = found.evidence.speedup or 0.0, found.evidence
    inside = (evidence.speedup_low or 0.0) <= against[0] <= (evidence.speedup_high or 0.0)
    return result | {
        "best_hand_made": best,
        "of_best_hand_made": by_hand[best],
        "speedup": {
            "measured": list(against),
            "claimed": [claimed, evidence.speedup_low, evidence.speedup_high],
            "held": abs(against[0] / claimed - 1) <= 0.10 and inside,
        },
    }


def of_script(name: str, found: Recommendation, blocks: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """A script's share of the recommendation's own speed, that which its file foretells, and its first step's loss."""
    target = EXPORTS[name].target
    speeds = [block["tokens_per_second"] for block in blocks]
    shares = [one[name] / one["recommended"] for one in speeds]
    return {
        "median": statistics.median(shares),
        "blocks": shares,
        "foretold": 1.0 / target.slower(found) if target is not None else 1.0,
        "tokens_per_second": [one[name] for one in speeds],
        "tokens_per_second_of_recommended": [one["recommended"] for one in speeds],
        "first_loss": [block["first_loss"][name] for block in blocks],
    }


def main() -> None:
    """Run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recommendation", type=Path, help="recommendation.json of the demo")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two blocks")
    parser.add_argument("--script", action="store_true", help="the recommendation and its exported scripts only")
    parser.add_argument("--exports", nargs="+", default=[TRAIN], choices=(TRAIN, "trainer", "trl"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.update(environment())
    found = recommendation(options.recommendation)
    exports = list(dict.fromkeys([TRAIN, *options.exports]))
    result = run(found, 2 if options.quick else options.blocks, exports, options.script)
    print(f"\n{result['machine']['name']}, {result['date']}: the recommendation is so many times as fast as")
    for name, times in result["times_as_fast_as"].items():
        print(f"  {name:32} " + ("failed" if times is None else f"{times[0]:.2f} ({times[1]:.2f}-{times[2]:.2f})"))
    for name, script in result["scripts"].items():
        blocks = ", ".join(f"{share:.2f}" for share in script["blocks"])
        print(f"exported {name} / recommended: {script['median']:.3f} ({blocks}; {script['foretold']:.2f} foretold)")
    if speedup := result.get("speedup"):
        print(f"best by hand: {result['best_hand_made']}: {result['of_best_hand_made']:.3f} (0.97 wanted)")
        claimed, low, high = speedup["claimed"]
        held = "holds" if speedup["held"] else "does NOT hold"
        print(f"claimed {claimed:.2f}x ({low:.2f}-{high:.2f}), {speedup['measured'][0]:.2f}x here: {held}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
