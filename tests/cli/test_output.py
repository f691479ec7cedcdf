"""What commands print: brackets in messages stay as they are, and doctor speaks from the catalogue."""

from __future__ import annotations

import io
import json
import os
import subprocess
import time
from collections.abc import Callable

import psutil
import pytest
from rich.console import Console

from service.cli import display, doctor, estimate_command
from service.cli.common import emit
from service.cli.output import console, say
from service.contract.hardware import HardwareFacts, Package
from service.contract.measurement import Outcome
from service.contract.states import Origin, TaskState
from service.contract.views import JobView, ListedTrial
from tests.factory import configuration, failed, measured
from tests.service.test_estimates import ANSWER

NASTY = "pip install 'dynotune[worker]' [/x] :smile:"


def trial(reason: str) -> ListedTrial:
    made = configuration()
    return ListedTrial(
        id="t",
        job_id="j",
        number=1,
        origin=Origin.baseline,
        state=TaskState.done,
        outcome=Outcome.crashed,
        attempt=1,
        progress=None,
        worker_id=None,
        started_at=None,
        finished_at=None,
        configuration=made,
        measurement=failed(made, reason=reason),
        fastest=False,
    )


def test_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    say(NASTY)
    assert capsys.readouterr().err == f"dynotune: {NASTY}\n"


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(display.trial_table([trial(NASTY)]))
    assert NASTY in capsys.readouterr().out


def test_json_has_no_word_for_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    """A diverged trial's losses are text in JSON output, as in the API's answers."""
    diverged = measured(configuration(), losses=(9.0, float("inf"), float("nan")))
    emit([trial(NASTY).model_copy(update={"measurement": diverged})])
    (shown,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert shown["measurement"]["losses"] == [9.0, "Infinity", "NaN"]


def test_doctor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, facts: Callable[..., HardwareFacts]
) -> None:
    found = facts(name="CPU [/x]", others=(NASTY,), packages={"peft": Package(problem=NASTY)}, topology=NASTY)
    monkeypatch.setattr(doctor, "device_facts", lambda: [found])
    assert doctor.report(console(), as_json=False) == 0
    said = capsys.readouterr().out
    assert said.count(NASTY) == 3 and "CPU [/x]: 16.0 GiB" in said


def test_doctor_says_what_each_package_brings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, facts: Callable[..., HardwareFacts]
) -> None:
    """It names the methods and choices that need a package, and never calls one of the catalogue's no lever."""
    names = ("flash_attn", "liger_kernel", "torchao", "apex", "bitsandbytes", "peft", "accelerate", "unheard_of")
    found = facts(packages=dict.fromkeys(names, Package(problem="not installed")))
    monkeypatch.setattr(doctor, "device_facts", lambda: [found])
    doctor.report(console(), as_json=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if ": not installed" in line]
    said = {line.split(":")[0].strip(): line for line in lines}
    assert list(said) == list(names) and not any("lever yet" in line for line in lines)
    for name, choices in (
        ("flash_attn", ("attention=flash-attention-2",)),
        ("liger_kernel", ("kernels=liger", "head=liger")),
        ("torchao", ("float8=tensorwise", "quantization=torchao-int8", "optimizer=")),
        ("apex", ("normalisation=apex-fused", "optimizer=")),
        ("bitsandbytes", ("method qlora", "optimizer=adamw-8bit")),
        ("peft", ("method lora, method qlora",)),
    ):
        assert all(choice in said[name] for choice in choices), said[name]
    assert "nothing" in said["unheard_of"] and "nothing" not in said["accelerate"]


def test_doctor_without_the_workers_packages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = subprocess.CompletedProcess([], 1, "", "ImportError: [/x]\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: broken)
    assert doctor.report(console(), as_json=False) == 1
    said = capsys.readouterr().out
    assert "ImportError: [/x]" in said and "dynotune's extra `worker`" in said


def test_doctor_says_who_is_on_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, facts: Callable[..., HardwareFacts]
) -> None:
    said = f"GPU-ab-12, {os.getpid()}, python, 300 MiB\nGPU-cd-34, 1, other, 1 MiB\nnonsense\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, said, ""))
    monkeypatch.setattr(doctor, "device_facts", lambda: [facts(device="cuda", has_own_memory=True, uuid="ab-12")])
    doctor.report(console(), as_json=False)
    out = capsys.readouterr().out
    assert f"process {os.getpid()} of {psutil.Process().username()} uses 300 MiB: python" in out and "other" not in out


HOSTILE = "job\x1b[2J\x1b]0;title\x07\u202egnp.exe\x9b31m\r\n000 forged row"
HARMLESS = "job\ufffd[2J\ufffd]0;title\ufffd\ufffdgnp.exe\ufffd31m 000 forged row"


def test_what_others_wrote_does_not_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE)
    assert capsys.readouterr().err == f"dynotune: {HARMLESS}\n"
    console().print(display.trial_table([trial(HOSTILE)]))
    assert HARMLESS in capsys.readouterr().out
    console().print(display.job_table([job_view(name=HOSTILE)]))
    (_, row) = capsys.readouterr().out.splitlines()
    assert HARMLESS in row
    display.Progress(console()).show(job_view(waiting_for=HOSTILE), [])
    assert f"queued: {HARMLESS}" in capsys.readouterr().out
    console().print("a log's\n\tlines\x1b[2J stay", soft_wrap=True)
    assert capsys.readouterr().out.splitlines() == ["a log's", "        lines\ufffd[2J stay"]


def job_view(**changes: object) -> JobView:
    given = {
        "id": "j",
        "name": "n",
        "status": "queued",
        "phase": "queued",
        "labels": {},
        "created_at": 0.0,
        "elapsed_seconds": 0.0,
        "error": None,
        "started_at": None,
        "finished_at": None,
        "progress": {"trials": {}, "planned": 0, "now": None},
        "best": None,
        "estimated_finish_at": None,
        "waiting_for": None,
        "notes": (),
        "spec": {"model": {"source": "m"}, "dataset": {"source": "d"}},
    }
    return JobView.model_validate(given | changes)


def test_the_line_of_a_job_tells_how_it_ended_and_when_it_is_late() -> None:
    """A failed job said `done`, and one that took longer than expected `about 0s left` for minutes."""
    now = time.time()
    failed = job_view(status="failed", phase="done", elapsed_seconds=8.0)
    assert display.status_line(failed) == "failed · 8s elapsed"
    assert (
        display.status_line(job_view(status="succeeded", phase="done", elapsed_seconds=8.0)) == "succeeded · 8s elapsed"
    )
    late, early = (
        display.status_line(job_view(status="running", phase="verifying", estimated_finish_at=now + left))
        for left in (-60, 90)
    )
    assert late == "verifying · 0s elapsed · it takes longer than expected"
    assert early.startswith("verifying · 0s elapsed · about 1m") and early.endswith(" left")


def test_a_small_screen_shows_the_fastest_and_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 80 columns and 24 lines, no row is cropped, and no lever with its choice is broken in two."""
    made = configuration(
        normalisation="low-precision", optimizer="adamw-8bit-stable-embedding", batching="packed-global"
    )
    trials = [
        trial("").model_copy(update={"id": f"t{number}", "number": number, "fastest": number == 3})
        for number in range(1, 21)
    ]
    trials = [
        trials[0],
        *(
            one.model_copy(
                update={"origin": Origin.search, "configuration": made, "measurement": measured(made), "outcome": "ok"}
            )
            for one in trials[1:]
        ),
    ]
    terminal = Console(width=80, height=24, force_terminal=True, file=io.StringIO())
    progress = display.Progress(terminal)
    lines = [
        "".join(segment.text for segment in line)
        for line in terminal.render_lines(progress.screenful(job_view(), trials))
    ]
    assert len(lines) <= 23
    shown = {int(line.split()[0]) for line in lines if line.split() and line.split()[0].isdigit() and "ok" in line}
    assert 3 in shown and 20 in shown and len(shown) >= 4, lines
    assert any("earlier trials: dynotune trials j" in line for line in lines)
    for choice in ("normalisation=low-precision", "optimizer=adamw-8bit-stable-embedding", "batching=packed-global"):
        assert sum(choice in line for line in lines) == len(shown), lines


def test_trials_are_asked_for_when_a_job_tells_of_something_new() -> None:
    asked = []

    def ask() -> list[ListedTrial]:
        asked.append(1)
        return [trial("")] * len(asked)

    known = display.Trials(ask)
    first, running = job_view(), job_view(progress={"trials": {"running": 1}, "planned": 2, "now": "trial 1: timing"})
    later = running.model_copy(update={"version": 3, "elapsed_seconds": 4.0})
    looks = (first, first, running, running, later, later.model_copy(update={"elapsed_seconds": 5.0}))
    assert [len(known.of(one)) for one in looks] == [1, 1, 2, 2, 3, 3]


def test_an_estimate_s_notes_stand_beside_its_largest_micro_batches() -> None:
    notes = {"lora": (8, "limited by training.effective_batch_size; 57 would fit"), "qlora": (9, ""), "full": (0, "no")}
    one = ANSWER.methods["lora"]
    methods = {
        name: one.model_copy(update={"largest_micro_batch": most, "note": note}) for name, (most, note) in notes.items()
    }
    terminal = Console(width=200, file=io.StringIO())
    estimate_command.show(ANSWER.model_copy(update={"methods": methods}), terminal)
    assert isinstance(terminal.file, io.StringIO)
    lines = terminal.file.getvalue().splitlines()
    ends = [line.rstrip("│ ").rpartition("│ ")[2].strip() for line in lines if line.startswith("│")]
    assert "peak" in lines[2] and all(
        f" {one.line.at(1) / 2**30:.2f} " in line for line in lines if line.startswith("│")
    )
    assert ends == ["8: limited by training.effective_batch_size; 57 would fit", "9", "0: no"]
