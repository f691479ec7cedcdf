"""The device lock: one holder, kept alive by a child that inherits it, and turns for those who wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from service.errors import Misconfigured
from worker.runner.lock import DeviceLock


def test_one_holder(tmp_path: Path) -> None:
    first, second = DeviceLock(tmp_path, "cpu-0"), DeviceLock(tmp_path, "cpu-0")
    assert first.acquire() and not second.acquire()
    assert DeviceLock(tmp_path, "cuda-0").acquire()  # another device is another lock
    first.release()
    assert second.acquire()
    second.release()


def test_other_users_may_take_it_whatever_our_umask_is(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        lock = DeviceLock(tmp_path / "locks", "cpu-0")
        assert lock.acquire()
        lock.awaited()
        lock.release()
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "locks").iterdir()} == {0o666}


@pytest.mark.parametrize("name", ["cpu-0.lock", "cpu-0.waiting"])
def test_a_link_of_somebody_else_is_not_followed(tmp_path: Path, name: str) -> None:
    """In a folder that all users may write to, it would have us truncate a file of our own, or make one for all."""
    (tmp_path / "kept").write_text("all of it")
    (tmp_path / "locks").mkdir()
    for target in ("kept", "absent"):
        (tmp_path / "locks" / name).symlink_to(tmp_path / target)
        with pytest.raises(Misconfigured, match="is no lock of dynotune's"):
            lock = DeviceLock(tmp_path / "locks", "cpu-0")
            assert lock.acquire()
            lock.awaited()
        (tmp_path / "locks" / name).unlink()
    (tmp_path / "locks" / name).hardlink_to(tmp_path / "kept")
    with pytest.raises(Misconfigured):
        lock = DeviceLock(tmp_path / "locks", "cpu-0")
        lock.awaited()
        lock.acquire()
    assert (tmp_path / "kept").read_text() == "all of it" and not (tmp_path / "absent").exists()


def test_a_file_that_is_there_is_not_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where fs.protected_regular is set, Linux refuses that for another user's file in a folder for all."""
    lock = DeviceLock(tmp_path, "cpu-0")
    assert lock.acquire()
    lock.release()
    opening = os.open

    def protected(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and Path(path).exists():
            raise PermissionError(13, "Permission denied", str(path))
        return opening(path, flags, mode)

    monkeypatch.setattr(os, "open", protected)
    assert lock.acquire()
    lock.release()


def test_whoever_waits_is_seen(tmp_path: Path) -> None:
    first, second = DeviceLock(tmp_path, "cpu-0"), DeviceLock(tmp_path, "cpu-0")
    assert first.acquire() and not first.awaited()
    assert not second.acquire() and first.awaited()
    first.release()
    assert second.acquire() and not first.awaited()
    second.release()


def test_a_child_keeps_the_lock_of_a_dead_worker(tmp_path: Path) -> None:
    lock = DeviceLock(tmp_path, "cpu-0")
    assert lock.acquire()
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], pass_fds=(lock.fd,), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    lock.release()  # as a killed worker would
    other = DeviceLock(tmp_path, "cpu-0")
    assert not other.acquire()
    child.communicate(b"\n")
    assert other.acquire()
    other.release()
