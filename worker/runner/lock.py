"""One lock file a device: whoever measures holds it, and the child inherits it.

flock belongs to the open file, so the lock outlives a killed worker for as long as its child lives, and not a
moment longer: nobody measures beside a leftover.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class DeviceLock:
    """The lock of one device on this host."""

    def __init__(self, folder: Path, name: str) -> None:
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o1777)  # every user's workers meet here
        self._path = folder / f"{name}.lock"
        self._queue = folder / f"{name}.waiting"
        self._file: int | None = None
        self._waiting: int | None = None

    @property
    def fd(self) -> int:
        """The open file that carries the lock; only while held."""
        assert self._file is not None, "the device lock is not held"
        return self._file

    def acquire(self) -> bool:
        """Take the lock if it is free. A refusal leaves word that somebody waits, until it is taken."""
        file = _open(self._path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            if self._waiting is None:
                self._waiting = _open(self._queue)
                fcntl.flock(self._waiting, fcntl.LOCK_SH)
            return False
        os.truncate(file, 0)
        os.write(file, f"{os.getpid()}\n".encode())
        self._file = file
        self.stop_waiting()
        return True

    def stop_waiting(self) -> None:
        """Take the word back that we wait."""
        if self._waiting is not None:
            os.close(self._waiting)
            self._waiting = None

    def release(self) -> None:
        """Let go. Without effect when not held."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def awaited(self) -> bool:
        """Whether somebody else waits for this device: then it is their turn."""
        file = _open(self._queue)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False


def _open(path: Path) -> int:
    """The file, made when it is not there, for every user of this host whatever our umask is."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    if os.fstat(file).st_uid == os.geteuid():
        os.fchmod(file, 0o666)
    return file
