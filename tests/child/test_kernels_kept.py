"""Batches of many lengths on a CPU, in 16 bits: what torch's libraries keep for each shape stays small."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT
from training.model import before_loading

CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
# 225 MiB with the libraries' own settings, 73 MiB with ours (2026-11-26, a CPU with AVX512-BF16).
MOST_MIB = 130
MANY_SHAPES = """
import torch
from types import SimpleNamespace
from training.model import before_loading
from worker.devices import open_device
before_loading(SimpleNamespace(matmul="highest", masked=True, before_loading=()))
device, weights = open_device("cpu", 0), torch.randn(64, 64, dtype=torch.bfloat16)
torch.nn.functional.linear(torch.randn(3, 64, dtype=torch.bfloat16), weights)
before = device.live()
for rows in range(4, 404):
    torch.nn.functional.linear(torch.randn(rows, 64, dtype=torch.bfloat16), weights)
print((device.live() - before) / 2**20)
"""


def test_many_shapes_take_little_memory() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in CACHES}
    done = subprocess.run(
        [sys.executable, "-c", MANY_SHAPES], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < MOST_MIB, done.stdout


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHES[0], "7")
    monkeypatch.delenv(CACHES[1], raising=False)
    before_loading(SimpleNamespace(matmul="highest", masked=True, before_loading=()))  # type: ignore[arg-type]
    assert [os.environ[name] for name in CACHES] == ["7", "128"]
