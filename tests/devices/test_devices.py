"""Kinds of device are found in their folder and say what sets them apart; the rest of the code asks for that alone."""

from __future__ import annotations

import ast
import platform
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from service import __version__
from service.source import version_of
from tests.conftest import ROOT
from worker.devices import cuda, discover, open_device
from worker.devices.facts import all_facts, commit_of, packages
from worker.devices.nvml import Nvml


def test_devices_are_in_their_order_and_say_what_they_can() -> None:
    kinds = discover()
    assert [name for name in kinds if name in ("cuda", "cpu")] == ["cuda", "cpu"], "an accelerator is before the host"
    assert list(kinds) == sorted(kinds, key=lambda name: (kinds[name].order, name))
    for name in ("has_own_memory", "first_call_per_shape", "can_pin", "runs_ahead", "gains_from_large_batches"):
        assert getattr(kinds["cuda"], name) is True and getattr(kinds["cpu"], name) is False


def test_an_unknown_kind_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="no device kind 'abacus'; known: .*cpu, .*cuda"):
        open_device("abacus")


def test_facts_carry_the_capabilities_of_their_kind() -> None:
    for facts in all_facts():
        assert facts.has_own_memory is discover()[facts.device].has_own_memory and facts.host == platform.node()
    places = [[*discover()].index(facts.device) for facts in all_facts()]
    assert places == sorted(places) and "cpu" in {facts.device for facts in all_facts()}


def test_the_code_counts_as_hardware_and_a_commit_only_of_its_own_checkout(tmp_path: Path) -> None:
    """Another repository's commits were taken for ours; in an image, without git, nothing told versions apart."""
    package = tmp_path / "venv" / "worker"
    package.mkdir(parents=True)
    (package / "a.py").write_text("1")
    before = version_of(package)
    assert version_of(package) == before
    (package / "a.py").write_text("2")
    assert version_of(package) != before
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path)]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run([*git, *command], check=True)
    assert commit_of(tmp_path / "venv") is None and len(commit_of(tmp_path) or "") == 12
    found = all_facts()[0]
    assert found.versions["dynotune"].startswith(f"{__version__}+")
    assert found.model_copy(update={"commit": "another"}).fingerprint == found.fingerprint


def test_a_gpu_that_cannot_be_used_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One whose memory others fill has no room for a context, which to ask for its memory needs."""

    def memory(index: int) -> tuple[int, int]:
        if index == 0:
            raise torch.OutOfMemoryError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")
        return 70 << 30, 80 << 30

    shape = SimpleNamespace(name="NVIDIA H100", major=9, minor=0, uuid="0-1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: shape)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(cuda, "_smi", lambda *asked: "580.1" if asked[0] == "--query-gpu=driver_version" else None)
    monkeypatch.setattr(Nvml, "is_for_one_process", lambda _: True)
    (facts,) = discover()["cuda"].found({"host": "h", "cores": 8, "versions": {}, "packages": {}})
    assert facts.index == 1 and facts.for_one_process and facts.driver == "580.1"
    said = capsys.readouterr().err
    assert said == "dynotune worker: cuda:0 is left out, as it cannot be used (CUDA error: out of memory)\n"


@pytest.mark.parametrize(
    ("expandable", "backend", "expected"),
    [(False, "native", 7), (True, "native", None), (False, "cudaMallocAsync", None)],
)
def test_what_a_gpu_could_not_free_is_told_of_fixed_segments_only(
    monkeypatch: pytest.MonkeyPatch, expandable: bool, backend: str, expected: int | None
) -> None:
    """By torch's names of what it counts, of which expandable segments have no unused parts."""
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    stats = {"active_bytes.all.peak": 5, "inactive_split_bytes.all.peak": 2}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: stats)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"is_expandable": expandable}])
    device = object.__new__(discover()["cuda"])
    device.torch = torch.device("cuda", 0)
    assert device.peak_unfreeable() == expected


def test_a_new_peak_leaves_a_gpus_cache_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache would have the next step ask the driver for its memory again, in the middle of a timing."""
    called: list[str] = []
    for name in ("reset_peak_memory_stats", "empty_cache", "synchronize", "ipc_collect"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: called.append(name))
    device = object.__new__(discover()["cuda"])
    device.torch = torch.device("cuda", 0)
    device.reset_peak()
    assert called == ["reset_peak_memory_stats"]


def test_packages_that_any_lever_needs_are_looked_for() -> None:
    found = packages()
    assert {"flash_attn", "torchao", "apex", "peft", "accelerate"} <= set(found)
    assert all((one.version is None) != (one.problem is None) for one in found.values())


ASKED_BY_NAME = ("training/trainers.py",)  # where Trainer's own setting asks whether it is the CPU


@pytest.mark.parametrize("folder", ["service", "worker", "training"])
def test_no_code_asks_for_a_kind_of_device_by_name(folder: str) -> None:
    """What differs is a capability, so that a new kind is one file."""
    for path in (ROOT / folder).rglob("*.py"):
        if path.relative_to(ROOT).as_posix() in ASKED_BY_NAME:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Compare):
                kinds = {one.value for one in (node.left, *node.comparators) if isinstance(one, ast.Constant)}
                assert not kinds & {"cuda", "cpu"}, f"{path}:{node.lineno}"
