"""benchmarks/gpu_acceptance.py, walked without a GPU: every part gives its rows, and goes on where it stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.acceptance import attention, by_hand
from benchmarks.acceptance.conformance import FILES, MORE
from benchmarks.acceptance.models import SHAPES, flops_a_token, length_around_a_token
from benchmarks.acceptance.peak import sustained
from benchmarks.acceptance.place import Failed, Late, Part, Place, Step
from benchmarks.acceptance.tuning import BERT, EIGHT, LONGER, ONE
from benchmarks.gpu_acceptance import CALLS, PARTS, walk
from benchmarks.store import Store
from service.contract.hardware import HardwareFacts, Package
from service.contract.job import JobSpec
from service.contract.measurement import DatasetFacts, Measurement
from service.contract.task import TrialRequest
from tests.conftest import ROOT
from tests.factory import configuration, measured
from worker.devices.simulated import Simulated, Span, World

# What runs the same functions as another part, on other rows or tests, is not walked a second time.
AGAIN = {"tune-1b": "tune-8b", "tune-bert": "tune-8b", "conformance-more": "conformance"}
WALKED = tuple(name for name in PARTS if name not in AGAIN)
COMMAND = [sys.executable, "-m", "benchmarks.gpu_acceptance"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder of a call's results."""
    (tmp_path / "home" / "dry").mkdir(parents=True)
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


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_part_runs_at_tiny_sizes_and_the_next_call_goes_on(
    home: Path, facts: Callable[..., HardwareFacts]
) -> None:
    """All parts in one call, so that the device, the rows and the models are looked at or made once."""
    results = home / "dry" / "results.json"
    results.write_text(json.dumps({"peak/matmul": {"reason": "it failed"}}))
    device = home / "device.json"
    device.write_text(facts().model_dump_json())
    options = ("--facts", str(device), "--dry-run", "--part")
    done, found = walked(home, *options, *WALKED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["dry_run"] is True and not found["left"]
    assert all("reason" not in row for row in found["rows"].values())
    assert {key.partition("/")[0] for key in found["rows"]} == set(WALKED)
    for part in WALKED:
        printed = done.stdout.partition(f"\n{part}\n")[2].splitlines()
        assert printed and printed[0].startswith("  "), f"the lines of the part {part} are in the table"
    away = [value for row in found["rows"].values() for name, value in row.items() if name.endswith("/away")]
    assert away and max(away) < 0.02, "fused LoRA and chunked heads compute what they replace, in bf16"
    assert found["rows"]["peak/matmul"]["tflops"] > 0, "what had failed was tried again"
    tuned = {key: row for key, row in found["rows"].items() if key.startswith("tune-8b/")}
    assert {row["method"] for row in tuned.values()} == {"lora", "qlora"}
    assert all(row["tokens_per_second"] > 0 for row in tuned.values())

    again, kept = walked(home, *options, "peak", "facts")
    assert again.stderr.count("from an earlier call") == 2 and kept["rows"] == found["rows"]


def test_what_is_not_walked_twice_has_steps_and_lines_of_its_own(
    home: Path, facts: Callable[..., HardwareFacts]
) -> None:
    place = Place(facts(), home, False, time.monotonic() + 600)
    for name, other in AGAIN.items():
        keys = [step.key for step in PARTS[name].steps(place)]
        assert len(keys) >= 3 and {key.partition("/")[0] for key in keys} == {name}
        makers = {step.make.func for part in (name, other) for step in PARTS[part].steps(place)}  # type: ignore[attr-defined]
        assert len(makers) <= 2, "the same functions"
    row = {"method": "lora", "speedup": 9.0, "stable": True, "statement": "", "levers": {}, "differs": {}}
    row |= {"baseline_tokens_per_second": 100.0, "speedup_low": 8.5, "speedup_high": 9.5, "micro_batch_size": 4}
    row |= {"rejected": 0, "methods": {"lora": {"tokens_per_second": 900.0, "flops_a_token": 1e9}}}
    speeds = {ONE.name: 900.0} | {job.name: 1000.0 for job in LONGER}
    rows = {f"tune-1b/{name}": row | {"tokens_per_second": speed} for name, speed in speeds.items()}
    lines = PARTS["tune-1b"].show(place, rows)
    assert any("first search against the best of all: 0.9 (0.97 wanted: NOT REACHED)" in line for line in lines), lines


def test_what_does_not_fit_into_the_time_is_left_and_the_rest_is_kept(
    home: Path, facts: Callable[..., HardwareFacts]
) -> None:
    store = Store(home / "results.json")
    store.put("a/early", {"value": 1})
    place = Place(facts(), home, False, time.monotonic() + 60, store.rows)
    rows = {"a/early": 50, "a/short": 30, "a/long": 90, "b/next": 1}

    def step(key: str) -> Step:
        return Step(key, rows[key], lambda _: {"value": key})

    part = Part("all", lambda _: [step(key) for key in rows], lambda *_: [])
    assert walk(place, [part], store) == ["a/long"]
    assert walk(place, [part], store, ["long"]) == [], "what is to be left out is not late either"
    kept = json.loads((home / "results.json").read_text())
    assert {key: row["value"] for key, row in kept.items()} == {"a/early": 1, "a/short": "a/short", "b/next": "b/next"}


@pytest.mark.parametrize(
    ("on_interrupt", "kind", "said"), [("sys.exit(130)", Late, "interrupted after"), ("None", Failed, "cut off after")]
)
def test_what_takes_too_long_may_end_in_order(
    home: Path,
    facts: Callable[..., HardwareFacts],
    on_interrupt: str,
    kind: type[Failed],
    said: str,
) -> None:
    """It is interrupted first, as by Ctrl-C, after which a job writes its best so far; and killed at the end."""
    script = f"""
        import signal, sys
        from pathlib import Path
        signal.signal(signal.SIGINT, lambda *_: {on_interrupt})
        Path({str(home / "ready")!r}).touch()
        while True: signal.pause()
    """
    to_end = 60.0 if kind is Late else 1.0
    place = Place(facts(), home, False, time.monotonic() + to_end + 10.0)
    with pytest.raises(Failed, match=said) as caught:
        place.python("-c", textwrap.dedent(script), to_end=to_end)
    assert type(caught.value) is kind and (home / "ready").exists()


def test_attention_is_timed_without_adding_gradients_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """`backward` would add to what earlier calls have left, which takes time that attention does not."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("gradients are added up")

    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    monkeypatch.setattr("benchmarks.acceptance.clock.LEAST_SECONDS", 0.0)
    found = attention.child(32, 64, 4)
    assert all(isinstance(found[f"{layout}/default"], float) for layout in attention.LAYOUTS), found


def test_flash_attention_is_told_where_samples_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package, whose kernels need a GPU."""

    def kernel(q: Any, k: Any, v: Any, causal: bool, **told: Any) -> tuple[Any, None]:
        assert causal and q.shape == (64, 4, 128) and k.shape == v.shape == (64, 1, 128)
        ends, most = told["cu_seqlens_q"].tolist(), told["max_seqlen_q"]
        assert ends == told["cu_seqlens_k"].tolist() and (ends[0], ends[-1]) == (0, 64)
        assert most == told["max_seqlen_k"] == max(last - first for first, last in pairwise(ends))
        return q + (k + v).sum(), None

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=kernel))
    monkeypatch.setattr("benchmarks.acceptance.clock.LEAST_SECONDS", 0.0)
    found = attention.child(32, 64, 4)
    assert all(isinstance(found[f"{layout}/flash-2"], float) for layout in attention.LAYOUTS), found
    assert "flash_attn_interface" in found["whole/flash-3"], "the reason of what is not installed"


@pytest.mark.parametrize("slowed", [(), ("heat",)])
def test_a_sustained_peak_says_why_the_clock_was_lowered(slowed: tuple[str, ...]) -> None:
    hot = (Span(1.0, 1e9, 0.5),) if slowed else ()
    device = Simulated(world=World(flops=1e7, throttled=hot))
    try:
        a = torch.ones(64, 64, device=device.torch)
        each, found = sustained(lambda: a @ a, device, 4.0)
    finally:
        device.close()
    assert found == list(slowed)
    assert (each > 1.2 * 2 * 64**3 / 1e7) is bool(slowed)


def test_the_larger_jobs_are_valid(home: Path, facts: Callable[..., HardwareFacts]) -> None:
    place = Place(facts(), home / "dry", True, time.monotonic() + 600)
    for name in ("llama-1b", "llama-8b"):  # weights, which take long to draw and which no job's check reads
        (place.home / "models" / name).mkdir(parents=True)
        (place.home / "models" / name / "model.safetensors").touch()
    for job in (*BERT, ONE, EIGHT):
        spec = JobSpec.model_validate(job.body(place))
        assert Path(spec.model.source, "config.json").is_file() and Path(spec.dataset.source).stat().st_size > 1000


def test_what_is_set_by_hand_goes_together(
    home: Path, facts: Callable[..., HardwareFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU with all packages, each case trains by the choices it names, however few minutes are left."""
    for name in ("llama-1b", "llama-8b"):  # weights, which take long to draw
        (home / "models" / name).mkdir(parents=True)
        (home / "models" / name / "model.safetensors").touch()
    kernels = {
        "liger_kernel": Package(version="0.8"),
        "peft": Package(version="1"),
        "bitsandbytes": Package(version="1"),
    }
    gpu = facts(device="cuda", capability=(9, 0), bf16_native=True, has_own_memory=True, packages=kernels)
    asked: list[dict[str, str]] = []

    def measured_now(_bench: Any, _spec: Any, _job: str, request: TrialRequest, *_: Any) -> tuple[Measurement, str]:
        asked.append(request.configuration.levers)
        facts_of_data = DatasetFacts.model_construct(rows=10, tokens=5120, histogram={"1024": 10})
        return measured(request.configuration).model_copy(update={"dataset": facts_of_data}), ""

    monkeypatch.setattr("benchmarks.acceptance.tuning.measure", measured_now)
    place = Place(gpu, home, False, time.monotonic() + 30)
    rows = {step.key: step.make(place) for step in by_hand.steps(place)}
    assert [row["left_out"] for row in rows.values()] == [{}] * len(by_hand.CASES)
    assert all(levers.items() >= case.changed.items() for levers, case in zip(asked, by_hand.CASES, strict=True))
    lines = by_hand.show(place, rows)
    assert len(lines) == len(by_hand.CASES) + len(by_hand.RATIOS) + 1, lines


def test_flops_leave_the_embedding_out_and_count_attention(home: Path, facts: Callable[..., HardwareFacts]) -> None:
    place = Place(facts(), home, False, time.monotonic())
    folder = home / "models" / "llama-8b"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SHAPES["llama-8b"]))
    rows = DatasetFacts.model_construct(rows=10, tokens=40_960, histogram={"4096": 10})
    measurement = measured(configuration()).model_copy(update={"dataset": rows})
    matmuls = 8_030_261_248 - 128_256 * 4096 - (2 * 32 + 1) * 4096  # of Llama 3 8B, without its embedding and norms
    attention = 2 * 2 * 4096 * 4096 / 2 * 32  # two products, a multiplication and an addition, half of the row
    found = flops_a_token(place, "llama-8b", "lora", "causal-lm", measurement)
    assert found == pytest.approx(4 * matmuls + 3 * attention)
    varying = rows.model_copy(update={"histogram": {"2000": 10, "4000": 5}, "tokens": 10 * 1000 + 5 * 3000})
    assert length_around_a_token(varying) == pytest.approx((10 * 1000**2 + 5 * 3000**2) / 25_000)
    assert flops_a_token(place, "llama-8b", "full", "causal-lm", measurement) - found == pytest.approx(2 * matmuls)

    folder = home / "models" / "bert-base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES["bert-base"]))
    matmuls, attention = 12 * (4 * 768**2 + 2 * 768 * 3072), 2 * 2 * 768 * 4096 * 12  # of the whole row, on both sides
    classified = flops_a_token(place, "bert-base", "full", "sequence-classification", measurement)
    assert classified == pytest.approx(6 * matmuls + 3 * attention)


def test_the_conformance_part_names_files_that_exist() -> None:
    assert [file for file, _ in FILES | MORE if not (ROOT / file).is_file()] == []


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done, _ = walked(tmp_path)
    assert done.returncode == 1 and "no NVIDIA GPU" in done.stderr and "--dry-run" in done.stderr


def test_five_calls_of_nine_minutes_run_every_part(facts: Callable[..., HardwareFacts]) -> None:
    """Two of them run one job each, which takes the minutes that are left; the others' steps fit into theirs."""
    assert sorted(name for call in CALLS for name in call) == sorted(PARTS) and len(CALLS) == 5
    place = Place(facts(device="cuda", capability=(9, 0)), Path("none"), False, time.monotonic())
    for number in (0, 3):
        assert sum(step.seconds for name in CALLS[number] for step in PARTS[name].steps(place)) <= 540
