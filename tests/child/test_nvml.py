"""What NVML says, by a stand-in: who else is on the GPU, and a clock that was lowered."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from worker.devices.nvml import Nvml, Reading

OTHER = 1


class NVMLError(Exception):
    """As pynvml's, which is made when it is imported."""


def sample(pid: int, share: int, stamp: float) -> Any:
    """One of a process."""
    return SimpleNamespace(pid=pid, smUtil=share, timeStamp=stamp)


def driver(**changes: Any) -> Any:
    """A stand-in for pynvml: a GPU at full clock with this process and another on it."""
    values = {
        "NVMLError": NVMLError,
        "NVML_CLOCK_SM": 1,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetClockInfo": lambda _handle, _kind: 1980,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _handle: 0,
        "nvmlDeviceGetComputeRunningProcesses": lambda _handle: [
            SimpleNamespace(pid=os.getpid()),
            SimpleNamespace(pid=OTHER),
        ],
        "nvmlDeviceGetProcessUtilization": lambda _handle, _since: [],
    }
    return SimpleNamespace(**(values | changes))


def failing(*_args: Any) -> Any:
    """As a call that the driver does not support."""
    raise NVMLError


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes an Nvml over a stand-in."""

    def make(**changes: Any) -> Nvml:
        monkeypatch.setitem(sys.modules, "pynvml", driver(**changes))
        return Nvml("1-2-3")

    return make


def test_others_on_the_gpu_count_while_they_were_there(gpu: Any) -> None:
    own, less, most = sample(os.getpid(), 99, 15), sample(OTHER, 30, 20), sample(OTHER, 50, 25)
    found = gpu(nvmlDeviceGetProcessUtilization=lambda _, since: [own, less, most, sample(OTHER, 80, 31)])
    assert found.others_share(Reading(10), Reading(30)) == 0.5, "our own and what came later are left out"
    assert found.others_share(Reading(10), Reading(40)) == 0.8
    two = gpu(nvmlDeviceGetProcessUtilization=lambda _, since: [less, sample(OTHER + 1, 40, 20), most])
    assert two.others_share(Reading(10), Reading(30)) == 0.9, "what several use adds up"


def test_a_candidate_that_takes_turns_is_no_other(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is paused in this one's turn, but what the driver samples first still holds the end of its own."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as sibling:
        monkeypatch.setattr(os, "getppid", os.getpid)  # as if this process were a child of the same fork server
        samples = [sample(sibling.pid, 95, 15), sample(OTHER, 30, 20)]
        found = gpu(nvmlDeviceGetProcessUtilization=lambda _, __: samples)
        assert found.others_share(Reading(10), Reading(30)) == 0.3
        alone = gpu(
            nvmlDeviceGetComputeRunningProcesses=lambda _: [
                SimpleNamespace(pid=one) for one in (os.getpid(), sibling.pid)
            ],
            nvmlDeviceGetProcessUtilization=failing,
        )
        assert alone.others_share(Reading(10), Reading(30)) == 0.0
        sibling.communicate(b"\n")


def test_a_hot_gpu_s_timings_are_not_clean_and_say_why(gpu: Any) -> None:
    found = gpu(nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 0x41)
    reading = found.reading()
    assert reading.clock_mhz == 1980 and reading.slowed_by() == ("thermal slowdown by the hardware",)
    assert found.others_share(Reading(0, 1980), reading) == 1.0
    capped = Reading(0, 1700, 0x04)
    assert not capped.slowed_by() and found.others_share(capped, capped) == 0.0, "it is how a busy GPU works"


def test_what_nvml_does_not_tell_is_unknown_and_not_clean(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under MIG, whose instances have no utilisation of processes, and in a container."""
    unsupported = gpu(nvmlDeviceGetClockInfo=failing, nvmlDeviceGetProcessUtilization=failing)
    reading = unsupported.reading()
    assert reading.clock_mhz is None and unsupported.others_share(reading, reading) is None
    alone = gpu(
        nvmlDeviceGetComputeRunningProcesses=lambda _: [SimpleNamespace(pid=os.getpid())],
        nvmlDeviceGetProcessUtilization=failing,
    )
    assert alone.others_share(reading, reading) == 0.0, "nobody else is on the list, whatever was sampled"
    assert gpu(nvmlDeviceGetComputeRunningProcesses=failing).others_share(reading, reading) is None
    elsewhere = gpu(
        nvmlDeviceGetComputeRunningProcesses=lambda _: [SimpleNamespace(pid=OTHER)],
        nvmlDeviceGetProcessUtilization=lambda _, __: [sample(OTHER, 90, 1)],
    )
    assert elsewhere.others_share(Reading(0), Reading(9)) is None, "a container's own process ids: nobody to tell apart"
    for absent in (gpu(nvmlInit=failing), gpu(nvmlDeviceGetHandleByUUID=failing)):
        assert absent.reading().clock_mhz is None and absent.others_share(Reading(0), Reading(9)) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Nvml("1-2-3").reading().clock_mhz is None


@pytest.mark.parametrize(("mode", "alone"), [(lambda _: 3, True), (lambda _: 0, False), (failing, False)])
def test_a_gpu_for_one_process_is_told(gpu: Any, mode: Any, alone: bool) -> None:
    assert gpu(nvmlDeviceGetComputeMode=mode, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS=3).is_for_one_process() is alone
    assert gpu(nvmlInit=failing).is_for_one_process() is False


def test_the_gpu_is_found_by_its_uuid(gpu: Any) -> None:
    """CUDA_VISIBLE_DEVICES renumbers devices; NVML's indices stay."""
    asked: list[str] = []
    gpu(nvmlDeviceGetHandleByUUID=asked.append)
    assert asked == ["GPU-1-2-3"]
