"""Removes files that are not needed again: old caches, and the scratch folders of workers that were killed."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from worker.runner.sandbox import SCRATCH

CACHE_DAYS, SCRATCH_DAYS = 7.0, 1.0
DAY = 86_400.0


def prune(home: Path) -> None:
    """Remove caches of jobs and quantised weights untouched for a week, and scratch folders untouched for a day.

    A running job touches its cache with every trial, and a job that goes on after a week fills its cache again.
    """
    for folder in (*(home / "cache").glob("*"), *(home / "quantised").glob("*")):
        _remove(folder, CACHE_DAYS)
    for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        _remove(folder, SCRATCH_DAYS)


def _remove(folder: Path, days: float) -> None:
    try:
        old = time.time() - folder.stat().st_mtime > days * DAY
    except OSError:
        return  # another worker has removed it
    if old:
        shutil.rmtree(folder, ignore_errors=True)
