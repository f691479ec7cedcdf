"""What a trial and the processes that it starts hold."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from worker.runner import watchdog

SIZE = 64 << 20
# Takes memory, forks a child that shares it, as a data loader's workers do, and waits.
FAMILY = f"""
import os, sys
held = bytearray(os.urandom(1 << 20) * {SIZE >> 20})
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print("ready", flush=True)
sys.stdin.read()
"""


def test_pages_that_a_family_shares_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "SLACK_BYTES", 0)
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        assert SIZE < watchdog.resident(process.pid) < 1.6 * SIZE
        assert watchdog.too_much(process.pid, 8 * SIZE) is None
        assert "its cap is 0.03 GiB" in str(watchdog.too_much(process.pid, SIZE // 2))
        process.stdin.close()


def test_one_process_is_read_and_one_that_has_gone_holds_nothing() -> None:
    assert watchdog.resident(os.getpid()) > 10 << 20
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert watchdog.resident(process.pid) == 0
