"""Old caches and scratch folders go, those in use stay."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from worker.runner.pruning import prune
from worker.runner.watchdog import too_much_disk


def made(folder: Path, days: float) -> Path:
    folder.mkdir(parents=True)
    (folder / "data.npz").write_bytes(b"1")
    at = time.time() - days * 86_400
    os.utime(folder, (at, at))
    return folder


def test_what_is_old_goes_and_what_is_in_use_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    old, fresh = made(tmp_path / "cache" / "old", 8), made(tmp_path / "cache" / "fresh", 6)
    dead, mine = made(tmp_path / "tmp" / "dynotune-trial-dead", 2), made(tmp_path / "tmp" / "dynotune-trial-mine", 0.5)
    other = made(tmp_path / "tmp" / "somebody-elses", 100)
    prune(tmp_path)
    assert [one.exists() for one in (old, fresh, dead, mine, other)] == [False, True, False, True, True]
    prune(tmp_path / "nothing-there")


def test_a_child_s_scratch_folder_is_in_use_as_long_as_it_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = made(tmp_path / "dynotune-trial-long", 2)
    assert too_much_disk(folder / "output") is None
    prune(tmp_path / "home")
    assert folder.exists()
    assert too_much_disk(tmp_path / "gone" / "output") is None
