"""The worker's command line: answered at once, because what takes long to import is imported where it is used."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from service.contract.hardware import HardwareFacts
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
    assert "Traceback" not in done.stderr and done.returncode == (0 if arguments == ["--help"] else 2)


def test_the_worker_s_rooms_import_nothing_slow() -> None:
    rooms = [f"worker.runner.{file.stem}" for file in (ROOT / "worker" / "runner").glob("[a-z]*.py")]
    done = run(f"import sys, {', '.join(rooms)}; print(sorted({SLOW!r} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--facts", "none.json"], "--facts: none.json holds no device's facts"),
        (["--until", "yesterday"], "--until: 'yesterday' is no time"),
        (
            ["--facts", "facts.json", "--devices", "cuda:7"],
            "--devices: there is no device cuda:7; there are: cpu:0, cpu.",
        ),
    ],
)
def test_a_mistake_in_an_option_is_a_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, tmp_path: Path, facts: Callable[..., HardwareFacts]
) -> None:
    (tmp_path / "facts.json").write_text(facts().model_dump_json())
    around = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "worker", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=around)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"dynotune worker: {sentence}")
