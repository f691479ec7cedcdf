"""The worker's command line: answered at once, because what takes long to import is imported where it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SLOW = {"torch", "transformers", "optuna", "sqlalchemy", "numpy"}


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("arguments", [["--help"], ["--facts", "nowhere.json"], ["--lease", "soon"]])
def test_an_answer_about_options_imports_nothing_slow(arguments: list[str]) -> None:
    done = run(
        "import runpy, sys\n"
        f"sys.argv = ['worker', *{arguments!r}]\n"
        "try:\n    runpy.run_module('worker', run_name='__main__')\n"
        f"finally:\n    print('slow:', sorted({SLOW!r} & set(sys.modules)))"
    )
    assert done.stdout.strip().splitlines()[-1] == "slow: []", done.stdout
    assert "Traceback" not in done.stderr and done.returncode == {"--help": 0, "--facts": 1}.get(arguments[0], 2)


def test_the_worker_s_rooms_import_nothing_slow() -> None:
    rooms = [f"worker.runner.{file.stem}" for file in (ROOT / "worker" / "runner").glob("[a-z]*.py")]
    done = run(f"import sys, {', '.join(rooms)}; print(sorted({SLOW!r} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_device_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "worker", "--facts", str(tmp_path / "none.json")],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("dynotune worker: --facts:") and "holds no device's facts" in done.stderr
