"""Is the demo's recommendation any good? It against six hand-made configurations and the baseline, interleaved.

    python -m benchmarks.demo_check [--recommendation FILE] [--blocks 5] [--quick] [--script] [--json FILE]

Runs `make demo`'s job first when no recommendation is given. Every block runs all candidates in a random order,
each in a fresh process, on the same samples with the block's seed; a candidate's figure is the median over the
blocks. Interleaving matters: machines are shared, and drift hits all candidates of a block alike. The recommendation's
exported `train.py` is one more candidate: a run of SCRIPT_STEPS steps, the first SCRIPT_WARM of them not counted.
`--script` compares these two only.
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

from service.contract.child import Result, RunBlock, Workplace
from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Outcome
from service.contract.recommendation import Recommendation
from service.exports import EXPORTS
from service.settings import Settings
from worker.runner.lock import DeviceLock
from worker.runner.main import discover, environment
from worker.runner.measuring import Bench
from worker.runner.sandbox import Sandbox

ROOT = Path(__file__).parent.parent
SCRIPT = "exported train.py"
SCRIPT_STEPS, SCRIPT_WARM = 40, 5
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
    winner, baseline = found.evidence.measurement, found.evidence.baseline
    assert baseline is not None, "the demo's baseline did not run"
    made = {"recommended": winner, "baseline": baseline}
    best_precision = "bf16-mixed" if facts.bf16_native else "fp32"
    for name, (levers, micro) in HAND_MADE.items():
        chosen = baseline.configuration.levers | {"precision": best_precision} | levers
        configuration: Configuration = baseline.configuration.model_copy(
            update={"levers": chosen, "micro_batch_size": micro}
        )
        made[name] = Measurement(configuration=configuration, outcome=Outcome.ok, micro_batch_size=micro)
    return made


def script_speed(script: Path) -> float:
    """Non-padding tokens/s of a run of the exported script, from its log."""
    log = script.with_suffix(".jsonl")
    command = [sys.executable, str(script), "--max-steps", str(SCRIPT_STEPS), "--log", str(log)]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}  # as the script's head advises
    output = ["--output", str(script.with_suffix(".out"))]
    subprocess.run([*command, *output], cwd=ROOT, env=environment, capture_output=True, check=True)
    steps = [line for line in map(json.loads, log.read_text().splitlines()) if "tokens" in line]
    first, last = steps[SCRIPT_WARM - 1], steps[-1]
    return float((last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"]))


def run(found: Recommendation, blocks: int, only_script: bool) -> dict[str, Any]:
    """All blocks; the result as JSON."""
    spec = JobSpec.model_validate(found.spec)
    facts = discover()[0]
    settings = Settings.from_environment()
    roots = (*settings.data_roots, ROOT)
    home = Path(tempfile.mkdtemp(prefix="dynotune-check-"))
    bench = Bench(
        Sandbox(facts.has_own_memory),
        facts,
        home,
        Workplace(device=facts.device, index=facts.index, data_roots=roots, hub_cache=settings.hub_cache),
    )
    lock = DeviceLock(settings.lock_folder, facts.lock_name)
    if not lock.acquire():
        sys.exit("a worker is measuring on this device; stop it first")
    made = {"recommended": found.evidence.measurement} if only_script else candidates(found, facts)
    seen: dict[str, list[float]] = {name: [] for name in (*made, SCRIPT)}
    script = home / "train.py"
    script.write_text(EXPORTS["train.py"].write(found), encoding="utf-8")
    failed: dict[str, str] = {}
    rng = random.Random(0)
    for number in range(blocks):
        order = list(seen)
        rng.shuffle(order)
        for name in order:
            if name in failed:
                continue
            if name == SCRIPT:
                seen[name].append(script_speed(script))
                print(f"block {number + 1}  {name:32} {seen[name][-1]:8,.0f} tokens/s", flush=True)
                continue
            place = bench.workplace_of("check")
            request = RunBlock(workplace=place, spec=spec, candidate=made[name], block=number, seed=1000 + number)
            ending = bench.sandbox.run(request, 900, lambda _: None, lambda: False, lock.fd)
            if not isinstance(ending.last, Result):
                failed[name] = ending.reason or ending.kind
                continue
            assert ending.last.block is not None and ending.last.block.timing is not None
            timing = ending.last.block.timing
            seen[name].append(timing.tokens / timing.seconds)
            share = "unknown" if timing.clean_share is None else f"{timing.clean_share:.0%}"
            print(
                f"block {number + 1}  {name:32} {seen[name][-1]:8,.0f} tokens/s  clean {share}",
                flush=True,
            )
    lock.release()
    return summary(found, facts, seen, failed)


def summary(
    found: Recommendation, facts: HardwareFacts, seen: dict[str, list[float]], failed: dict[str, str]
) -> dict[str, Any]:
    """Medians, the ratio to the best hand-made one, and whether the claimed speed-up holds."""
    medians = {name: statistics.median(values) for name, values in seen.items() if values}
    of_script = [theirs / ours for ours, theirs in zip(seen["recommended"], seen[SCRIPT], strict=True)]
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"name": facts.name, "cores": facts.cores, "os": platform.platform(), "versions": facts.versions},
        "recommended": found.evidence.measurement.configuration.model_dump(mode="json"),
        "micro_batch_size": found.configuration.micro_batch_size,
        "tokens_per_second": {name: {"median": medians[name], "blocks": seen[name]} for name in medians},
        "failed": failed,
        "script_of_recommended": {"median": statistics.median(of_script), "blocks": of_script},
    }
    if "baseline" not in seen:
        return result
    by_hand = {name: value for name, value in medians.items() if name in HAND_MADE}
    best = max(by_hand, key=lambda name: by_hand[name])
    of_best = [ours / theirs for ours, theirs in zip(seen["recommended"], seen[best], strict=True)]
    speedups = [ours / theirs for ours, theirs in zip(seen["recommended"], seen["baseline"], strict=True)]
    speedup, claimed = statistics.median(speedups), found.evidence.speedup or 0.0
    return result | {
        "best_hand_made": best,
        "of_best_hand_made": statistics.median(of_best),
        "speedup": {
            "median": speedup,
            "blocks": speedups,
            "claimed": claimed,
            "held": abs(speedup / claimed - 1) <= 0.15,
        },
    }


def main() -> None:
    """Run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recommendation", type=Path, help="recommendation.json of the demo")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two blocks")
    parser.add_argument("--script", action="store_true", help="the recommendation and its exported train.py only")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.update(environment())
    result = run(recommendation(options.recommendation), 2 if options.quick else options.blocks, options.script)
    print(f"\n{result['machine']['name']}, {result['date']}")
    medians = {name: values["median"] for name, values in result["tokens_per_second"].items()}
    for name in sorted(medians, key=lambda name: -medians[name]):
        times = f"  {medians[name] / medians['baseline']:5.2f}x" if "baseline" in medians else ""
        print(f"{name:32} {medians[name]:8,.0f} tokens/s{times}")
    for name, reason in result["failed"].items():
        print(f"{name:32} failed: {reason}")
    script = result["script_of_recommended"]["median"]
    print(f"exported train.py / recommended: {script:.3f} (0.9 to 1.1 wanted)")
    if speedup := result.get("speedup"):
        by_hand = f"{result['of_best_hand_made']:.3f} (0.97 wanted)"
        print(f"recommended / best hand-made ({result['best_hand_made']}): {by_hand}")
        held = "holds within 15%" if speedup["held"] else "does NOT hold within 15%"
        print(f"speed-up over the baseline: {speedup['median']:.2f}x here, {speedup['claimed']:.2f}x claimed: {held}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
