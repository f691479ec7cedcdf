"""benchmarks/gpu_acceptance.py, walked without a GPU: every part gives its rows, and goes on where it stopped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.acceptance.conformance import FILES
from benchmarks.acceptance.place import Place
from benchmarks.acceptance.tuning import BERT, EIGHT, ONE
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from tests.conftest import ROOT

# The other two parts of whole jobs differ from tune-bert in what they submit only, which has a test of its own.
PARTS = ("facts", "conformance", "memory", "attention", "tune-bert", "overhead", "lora-kernels", "seed-tables")
COMMAND = [sys.executable, "-m", "benchmarks.gpu_acceptance"]


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows that the parts take their data from: making them takes longer than most parts."""
    folder = tmp_path_factory.mktemp("rows")
    subprocess.run([sys.executable, str(ROOT / "examples" / "stdlib_data.py"), "--out", str(folder)], check=True)
    return folder


@pytest.fixture
def home(tmp_path: Path, rows: Path) -> Path:
    """The folder of a call's results, with the rows in it."""
    shutil.copytree(rows, tmp_path / "home" / "dry" / "data")
    return tmp_path / "home"


def walked(home: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The call, and the rows in its JSON."""
    file = home / "out.json"
    done = subprocess.run(
        [*COMMAND, "--home", str(home), "--json", str(file), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    return done, json.loads(file.read_text()) if file.exists() else {}


def run_part(home: Path, part: str) -> dict[str, dict[str, Any]]:
    """The rows of one part, which ran to its end and printed its lines."""
    done, found = walked(home, "--dry-run", "--part", part)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["dry_run"] is True and not found["left"]
    assert found["rows"] and all("reason" not in row for row in found["rows"].values())
    assert {key.partition("/")[0] for key in found["rows"]} == {part}
    printed = done.stdout.partition(f"\n{part}\n")[2].splitlines()
    assert printed and printed[0].startswith("  "), "the part's lines are in the table"
    return dict(found["rows"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", PARTS)
def test_every_part_runs_at_tiny_sizes(home: Path, part: str) -> None:
    found = run_part(home, part)
    away = [value for row in found.values() for name, value in row.items() if name.endswith("/away")]
    assert max(away, default=0.0) < 0.02, "the fused LoRA computes what peft computes, in bf16"


def test_the_larger_jobs_are_valid(home: Path, facts: Callable[..., HardwareFacts]) -> None:
    place = Place(facts(), home / "dry", True, time.monotonic() + 600)
    for job in (*BERT, ONE, EIGHT):
        spec = JobSpec.model_validate(job.body(place))
        assert Path(spec.model.source, "config.json").is_file() and Path(spec.dataset.source).stat().st_size > 1000


def test_the_next_call_goes_on_and_tries_again_what_failed(home: Path) -> None:
    (home / "dry" / "results.json").write_text(json.dumps({"peak/matmul": {"reason": "it failed"}}))
    first = run_part(home, "peak")
    assert first["peak/matmul"]["tflops"] > 0
    done, found = walked(home, "--dry-run", "--part", "peak")
    assert "from an earlier call" in done.stderr and found["rows"] == first


def test_the_conformance_part_names_files_that_exist() -> None:
    assert [file for file, _ in FILES if not (ROOT / file).is_file()] == []


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done, _ = walked(tmp_path)
    assert done.returncode == 1 and "no NVIDIA GPU" in done.stderr and "--dry-run" in done.stderr
