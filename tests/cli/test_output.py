"""Text of others on the terminal: brackets stay what they are, and never crash a command."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from service.cli import display, doctor
from service.cli.output import console, say
from service.contract.hardware import HardwareFacts, Package
from tests.factory import configuration, failed

NASTY = "pip install 'dynotune[worker]' [/x] :smile:"


def trial(reason: str) -> dict[str, Any]:
    made = configuration()
    return {
        "id": "t",
        "number": 1,
        "origin": "baseline",
        "state": "done",
        "outcome": "crashed",
        "progress": None,
        "configuration": made.model_dump(mode="json"),
        "measurement": failed(made, reason=reason).model_dump(mode="json"),
    }


def test_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    say(NASTY)
    assert capsys.readouterr().err == f"dynotune: {NASTY}\n"


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(display.trial_table([trial(NASTY)]))
    assert NASTY in capsys.readouterr().out


def test_doctor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, facts: Callable[..., HardwareFacts]
) -> None:
    found = facts(name="CPU [/x]", others=(NASTY,), packages={"peft": Package(problem=NASTY)}, topology=NASTY)
    monkeypatch.setattr(doctor, "_facts", lambda: ([found], None))
    assert doctor.report(console(), as_json=False) == 0
    said = capsys.readouterr().out
    assert said.count(NASTY) == 3 and "CPU [/x]: 16.0 GiB" in said


def test_doctor_without_the_workers_packages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = subprocess.CompletedProcess([], 1, "", "ImportError: [/x]\n")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: broken)
    assert doctor.report(console(), as_json=False) == 1
    said = capsys.readouterr().out
    assert "ImportError: [/x]" in said and "pip install 'dynotune[worker]'" in said


def test_doctor_says_who_is_on_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, facts: Callable[..., HardwareFacts]
) -> None:
    said = f"GPU-ab-12, {os.getpid()}, python, 300 MiB\nGPU-cd-34, 1, other, 1 MiB\nnonsense\n"
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, said, ""))
    monkeypatch.setattr(doctor, "_facts", lambda: ([facts(device="cuda", has_own_memory=True, uuid="ab-12")], None))
    doctor.report(console(), as_json=False)
    out = capsys.readouterr().out
    assert f"process {os.getpid()} of {psutil.Process().username()} uses 300 MiB: python" in out and "other" not in out
