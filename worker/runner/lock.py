"""The lock file of a device: a worker holds the lock while it measures or a child stays, which inherits the open file.

flock belongs to the open file, so a killed worker's lock lasts exactly as long as its child lives: no other worker
measures on the device beside a child that was left behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

from service.errors import Misconfigured

# All users of a host may write into the folder, so what has a lock's name may be another user's link to our own files.
FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class DeviceLock:
    """The lock of one device on this host."""

    def __init__(self, folder: Path, name: str) -> None:
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o1777)  # all users' workers share this folder
        self._path = folder / f"{name}.lock"
        self._queue = folder / f"{name}.waiting"
        self._file: int | None = None
        self._waiting: int | None = None

    @property
    def fd(self) -> int:
        """The descriptor of the open file that carries the lock; only while the lock is held."""
        assert self._file is not None, "the device lock is not held"
        return self._file

    def acquire(self) -> bool:
        """Take the lock if it is free. After a refusal this worker counts as waiting until it has taken the lock."""
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

    def holder(self) -> str:
        """Who holds the lock, by the file's own word: its process's id is of the machine or container it runs in."""
        with contextlib.suppress(OSError):
            if pid := self._path.read_text()[:20].strip():
                return f"process {pid} (it holds {self._path})"
        return f"another process (it holds {self._path})"

    def stop_waiting(self) -> None:
        """Do not count as waiting any more."""
        if self._waiting is not None:
            os.close(self._waiting)
            self._waiting = None

    def release(self) -> None:
        """Release the lock; without effect when it is not held."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def awaited(self) -> bool:
        """Whether another worker waits for this device."""
        file = _open(self._queue)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False


def _open(path: Path) -> int:
    """Open the file; where it is missing, create it so that every user can open it, whatever the umask is.

    Misconfigured where it is no plain file of that one name.
    """
    try:
        file = _opened(path)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise _no_lock(path) from error
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(file)
        raise _no_lock(path)
    return file


def _opened(path: Path) -> int:
    while True:
        try:
            # Where fs.protected_regular is set, a file of another user in a folder for all is not opened to be created.
            return os.open(path, FLAGS)
        except FileNotFoundError:
            try:
                file = os.open(path, FLAGS | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:  # another worker was faster
                continue
            os.fchmod(file, 0o666)
            return file


def _no_lock(path: Path) -> Misconfigured:
    return Misconfigured(
        f"{path} is no lock of dynotune's: it is a link, or no plain file. Somebody else may have put it there; have "
        "it removed, or set DYNOTUNE_LOCKS to a folder that only dynotune's users can write to."
    )
