"""The memory probe on a CPU under a cap, in processes of its own: the cap must not hit the tests' process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.child import tiny
from tests.child.probing import EFFECTIVE, ROOM
from tests.conftest import ROOT
from tests.once import made_once
from worker.child.size_search import MARGIN, MOST_SIZES
from worker.devices.base import is_out_of_memory


@pytest.fixture(scope="module")
def answers(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What every case said: a dictionary of dictionaries."""
    data = tiny.write(tmp_path_factory.mktemp("probe") / "rows.jsonl", tiny.pairs(160, most=70))
    return made_once(tmp_path_factory, "probing", lambda: probed(llama, data))


def probed(llama: Path, data: Path) -> dict[str, dict[str, Any]]:
    """Run the cases, which takes half a minute."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.child.probing", str(llama), str(data)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line) if line.startswith("{") else {}
    return found


def test_exact_memory_makes_peaks_affine_and_repeatable(answers: dict[str, Any]) -> None:
    micros, peaks = np.array(answers["affine"]["micros"]), np.array(answers["affine"]["peaks"], dtype=float)
    slope, rest = np.polyfit(micros, peaks, 1)
    grown = slope * (micros.max() - micros.min())
    assert slope > 1 << 20, "each sample costs logits of 64 x 8192 floats, several times over"
    assert np.abs(peaks - (rest + slope * micros)).max() < 0.06 * grown
    assert np.abs(peaks[:3] - peaks[3:]).max() < 0.06 * grown


@pytest.mark.parametrize("case", ["largest", "packed"])
def test_the_largest_micro_batch_was_run_and_fits(answers: dict[str, Any], case: str) -> None:
    found = answers[case]
    assert found["limited_by"] == "memory" and 2 < found["largest"] < EFFECTIVE
    assert found["largest"] == max(found["probes"]) and 0 <= found["predicted"] - found["largest"] <= 1
    assert found["peak"] <= found["capacity"]
    assert found["again"] == {"type": None}, "it runs a second time"
    assert found["begun"] == found["probes"] == found["told"] and len(found["probes"]) <= MOST_SIZES


@pytest.mark.parametrize("case", ["largest", "packed"])
def test_the_largest_is_close_to_the_limit(answers: dict[str, Any], case: str) -> None:
    """What stays free is what the probe keeps back, and the two samples that rounding and correcting may cost."""
    found = answers[case]
    sample = (found["peak"] - (found["capacity"] - ROOM)) / found["largest"]
    assert found["capacity"] - found["peak"] < MARGIN * found["capacity"] + 3 * max(sample, 8 << 20)


@pytest.mark.parametrize("case", ["largest", "packed"])
def test_twice_the_largest_is_recognised_as_out_of_memory(answers: dict[str, Any], case: str) -> None:
    assert answers[case]["twice"]["out_of_memory"] is True, answers[case]["twice"]


def test_with_room_the_effective_batch_limits(answers: dict[str, Any]) -> None:
    found = answers["roomy"]
    assert (found["largest"], found["limited_by"]) == (EFFECTIVE, "effective batch")


@pytest.mark.parametrize("case", ["largest", "packed", "roomy"])
def test_probing_leaves_weights_and_learning_rates(answers: dict[str, Any], case: str) -> None:
    assert answers[case]["same_weights"] and answers[case]["same_rates"]


def test_the_cap_is_where_it_was_set(answers: dict[str, Any]) -> None:
    found = answers["above"]
    assert found["below"] == {"type": None}
    assert found["above"]["out_of_memory"] is True, found["above"]
    assert found["python"]["type"] == "MemoryError" and found["python"]["out_of_memory"] is True


@pytest.mark.parametrize("case", ["shapes", "index", "inplace", "graph"])
def test_other_errors_are_not_taken_for_a_shortage(answers: dict[str, Any], case: str) -> None:
    assert answers["above"][case]["type"] in ("RuntimeError", "IndexError")
    assert answers["above"][case]["out_of_memory"] is False, answers["above"][case]


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"), True),
        (
            RuntimeError(
                'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1016, please '
                "report a bug to PyTorch."
            ),
            True,
        ),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("can't start new thread"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (RuntimeError("Expected all tensors to be on the same device"), False),
        (ValueError("out of memory"), False),
        (KeyError("memory"), False),
    ],
)
def test_what_out_of_memory_looks_like(error: Exception, is_it: bool) -> None:
    assert is_out_of_memory(error) is is_it
