"""How much longer a token takes in a run than in the work unit, for each batching, and what the correction says.

    python -m benchmarks.unit_and_run [--json FILE]

Nothing is trained: a micro batch takes the seconds of a cost that is known, so that the true ratio is known as well.
`run over unit` is that ratio, `corrected` the one of worker/child/typical.py, which sees the unit's micro batches only.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from service.contract.job import JobSpec
from service.levers import LEVERS
from tests.factory import configuration
from training.samples import Step
from worker.child import typical
from worker.child.arrange import plan_of, shape_of
from worker.child.build import recipe_of
from worker.child.data import work_unit

EFFECTIVE, MICRO, LONGEST, SAMPLES, UNIT = 16, 8, 256, 6000, 64
EPOCHS = 3
LAUNCH, TOKEN, UPDATE = 3e-3, 1e-4, 1e-2  # seconds of a micro batch, of each of its tokens, and of an update
CURVED = 1e-7  # seconds of a row for each square of its width, where attention counts


def rare(rng: random.Random) -> list[int]:
    """Lengths of which two in a thousand are the longest, and the others short."""
    return [LONGEST if at % 500 == 7 else rng.randrange(8, 38) for at in range(SAMPLES)]


def heavy(rng: random.Random) -> list[int]:
    """Lengths with a heavy tail."""
    return [min(LONGEST, int(3 + 8 * rng.paretovariate(1.3))) for _ in range(SAMPLES)]


DATA: dict[str, Callable[[random.Random], list[int]]] = {"rare": rare, "heavy": heavy}


@dataclass(frozen=True)
class Compared:
    """The true ratio of a token's seconds in a run over those in the unit, and the ratio that is computed."""

    true: float
    computed: float


def made(batching: str, lengths: list[int]) -> Any:
    """What arranging samples needs of a bundle."""
    spec = JobSpec.model_validate(
        {"model": {"source": "m"}, "dataset": {"source": "d", "max_length": LONGEST}, "method": "lora"}
    )
    chosen = configuration(effective=EFFECTIVE, batching=batching)
    data = SimpleNamespace(lengths=lengths, typical=lengths)
    return SimpleNamespace(spec=spec, configuration=chosen, recipe=recipe_of(spec, chosen), data=data)


def compared(name: str, batching: str, curved: float) -> Compared:
    """A unit and a run of a batching on the data of that name."""
    bundle = made(batching, DATA[name](random.Random(1)))
    lengths = bundle.data.lengths
    plan = plan_of(bundle, work_unit(lengths, UNIT, 1, EFFECTIVE), MICRO)
    orders = (random.Random(seed).sample(range(SAMPLES), SAMPLES) for seed in range(EPOCHS))
    run = [step for order in orders for step in plan_of(bundle, order, MICRO)]
    of_unit, of_run = typical.Shapes(plan, lengths, bundle), typical.Shapes(run, lengths, bundle)
    timed = seconds(bundle, plan, curved)
    unit_seconds, run_seconds = (
        sum(taken for _, _, taken in seconds(bundle, steps, curved)) + UPDATE * len(steps) for steps in (plan, run)
    )
    return Compared(
        (run_seconds / of_run.tokens) / (unit_seconds / of_unit.tokens),
        typical.token_factor(of_unit, typical.of_run(bundle, MICRO), timed, UPDATE),
    )


def seconds(bundle: Any, plan: list[Step], curved: float) -> list[tuple[int, int, float]]:
    """(rows, width, seconds) of each micro batch by the known cost."""
    shapes = [shape_of(micro, bundle.data.lengths, bundle.recipe) for step in plan for micro in step]
    return [(rows, width, LAUNCH + TOKEN * rows * width + curved * rows * width**2) for rows, width in shapes]


def main() -> None:
    """Print a table, and write it as JSON where asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'data':6} {'batching':14} {'attention':9} {'run over unit':>13} {'corrected':>9}")
    for name in DATA:
        for batching in LEVERS["batching"].names:
            for attention, curved in (("linear", 0.0), ("quadratic", CURVED)):
                found = compared(name, batching, curved)
                print(f"{name:6} {batching:14} {attention:9} {found.true:13.3f} {found.computed:9.3f}")
                rows.append({"data": name, "batching": batching, "attention": attention, **vars(found)})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
