"""How far rounding moves the gradients of single matrices, and how far a fault does: what a proof's limit is held to.

    python -m benchmarks.gradients [--json FILE]

The demo's model (`make examples/data/functions.jsonl` makes its data) with drawn weights, of the usual size and of five
times that, trains one step in each configuration and in its reference, and the values that a replay tells are compared.
The fault is a rotary embedding that writes in place under selective checkpointing, which keeps what it writes over.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers.models.llama import modeling_llama

from benchmarks.planted import faults
from service.contract.child import Workplace
from service.contract.job import JobSpec
from service.contract.measurement import Measurement
from service.contract.replay import Replay
from service.devices import device_facts
from tests.factory import configuration, measured
from worker.child import replay as replays
from worker.child.build import build
from worker.devices import open_device
from worker.plan import proof

ROOT = Path(__file__).parent.parent
MODEL, DATA = ROOT / "examples" / "llama-13m", ROOT / "examples" / "data" / "functions.jsonl"
SEED, MICRO, EFFECTIVE = 7, 2, 8
SELECTIVE = {"precision": "fp32", "checkpointing": "selective"}
FAULT = "rotated in place under selective checkpointing"
# Name -> (method, levers). The last but one is sound, and the same as the fault without it.
CASES: dict[str, tuple[Any, dict[str, str]]] = {
    "full, bf16 autocast": ("full", {"precision": "bf16-mixed"}),
    "full, bf16": ("full", {"precision": "bf16"}),
    "full, bf16 autocast, norms in 16 bits, packed": (
        "full",
        {"precision": "bf16-mixed", "normalisation": "low-precision", "batching": "packed"},
    ),
    "LoRA, bf16": ("lora", {"precision": "bf16"}),
    "LoRA, bf16 autocast, fused projections": ("lora", {"precision": "bf16-mixed", "projections": "fused"}),
    "QLoRA, NF4, bf16 autocast": ("qlora", {"quantization": "nf4", "precision": "bf16-mixed"}),
    "QLoRA, int8, bf16 autocast": ("qlora", {"quantization": "int8", "precision": "bf16-mixed"}),
    "full, fp32, selective checkpointing": ("full", SELECTIVE),
    FAULT: ("full", SELECTIVE),
}


def model_of(folder: Path, times: float) -> Path:
    """A copy of the demo's model folder whose drawn weights are so many times as large."""
    for file in MODEL.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["initializer_range"] = times * config.get("initializer_range", 0.02)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def one_step(spec: JobSpec, candidate: Measurement, stirs: bool, steps: replays.Steps = ()) -> Replay:
    """What a configuration does in one step: its own, or one of the samples that are given."""
    place = Workplace(device="cpu", data_roots=(ROOT, Path(spec.model.source)), hub_cache=ROOT)
    bundle = build(spec, candidate.configuration, open_device("cpu"), place, SEED)
    if steps:
        given, plan = replays.followed(steps, bundle.data.lengths, MICRO)
    else:
        given, plan = replays.arranged(bundle, 1, proof.samples_a_step(candidate), MICRO, SEED)
    return replays.replay(bundle, plan, given, stirs)


def measure(name: str, folder: Path) -> dict[str, Any]:
    """How far a case's gradients, their norm and the loss are from the reference's."""
    method, levers = CASES[name]
    spec = JobSpec.model_validate(
        {
            "model": {"source": str(folder), "weights": "random"},
            "dataset": {"source": str(DATA), "max_length": 512},
            "method": method,
            "training": {"effective_batch_size": EFFECTIVE, "learning_rate": 1e-4},
        }
    )
    candidate = measured(configuration(method, EFFECTIVE, None, **levers), micro_batch_size=MICRO)
    reference = proof.references_of(candidate, device_facts()[0])[0][1]
    rotary = modeling_llama.apply_rotary_pos_emb
    try:
        if name == FAULT:
            faults.rotates_in_place(faults.Forever())
        ours = one_step(spec, candidate, proof.stirs(candidate))
    finally:
        modeling_llama.apply_rotary_pos_emb = rotary
    theirs = one_step(spec, reference, proof.stirs(candidate), ours.steps)
    away = proof.gradients_away(ours, theirs)
    worst = max(away, key=lambda one: away[one])
    size = max(max(one, 1 / max(one, 1e-9)) for one in proof.gradient_sizes(ours, theirs).values())
    norm = (ours.grad_norms[0] or 0.0) / (theirs.grad_norms[0] or 1.0) - 1
    return {
        "case": name,
        "matrices": len(away),
        "largest": away[worst],
        "of": worst,
        "size": size,
        "norm": abs(norm),
        "loss": abs(ours.losses[0] / theirs.losses[0] - 1),
    }


def main() -> None:
    """Run all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    if not DATA.exists():
        parser.error(f"{DATA} is missing; `make examples/data/functions.jsonl` makes it")
    rows = []
    for times in (1, 5):
        print(f"weights {times} times as large as usual")
        with tempfile.TemporaryDirectory() as made:
            folder = model_of(Path(made), times)
            for name in CASES:
                rows.append(measure(name, folder) | {"weights": times})
                row = rows[-1]
                print(
                    f"  {name:50} {row['largest']:7.1%} of {row['of']}; one is {row['size']:.2f} times as large or "
                    f"small; all gradients' norm {row['norm']:.2%}, loss {row['loss']:.3%}",
                    flush=True,
                )
    if options.json:
        about = {"machine": f"{platform.machine()} {platform.system()}", "torch": torch.__version__}
        options.json.write_text(json.dumps(about | {"date": time.strftime("%Y-%m-%d"), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
