"""Data that users send to the control plane, kept by its own SHA-256 digest: the same data is kept once."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from service import logs
from service.contract.paths import UPLOAD, UPLOADED
from service.errors import BadUpload, NotFound, SlowBody, Unavailable
from service.rows import ENDINGS

KEPT_SECONDS = 24 * 3600.0  # for which data is kept that no job names, or that no task has used
OWNER = ".owner"  # the file that notes whose uploads a folder holds
COPIES = "copies of "  # before the URL of the control plane, in the note of a worker that fetches uploads
log = logs.logger("dynotune.uploads")
CHUNK_SECONDS = 30.0  # in which some more of the data must arrive
LOOK_BYTES = 8 << 20  # that arrive between two looks at the free disk


def suffix_of(name: str) -> str:
    """The suffix of a file's name, which says how it is read; BadUpload where it is none that a dataset has."""
    suffix = Path(name).suffix.lower()
    if suffix not in ENDINGS:
        raise BadUpload(f"name must end in one of {', '.join(ENDINGS)}, not {name[-40:]!r}.")
    return suffix


async def receive(
    folder: Path, chunks: AsyncIterator[bytes], suffix: str, wanted: str | None, most: int, reserve: int
) -> Path:
    """Store what arrives, and return its file, whose name is its digest.

    BadUpload when it is larger than `most` bytes, empty, or not of the digest that its sender names; Unavailable when
    the disk has fewer than `reserve` bytes free, which a database on the same disk may need.
    """
    with _full_disk_is_told(), _partial(folder) as (file, path):
        _must_have_room(folder, reserve)
        digest, size, looked = hashlib.sha256(), 0, 0
        async for chunk in _in_time(chunks):
            size += len(chunk)
            if size - looked >= LOOK_BYTES:
                _must_have_room(folder, reserve)
                looked = size
            if size > most:
                raise BadUpload(f"The data is larger than the {most >> 20} MiB that DYNOTUNE_UPLOAD_MIB allows.")
            digest.update(chunk)
            file.write(chunk)
        if not size:
            raise BadUpload("The body is empty; it must be the dataset's file.")
        await asyncio.to_thread(_to_disk, file)  # a GiB takes seconds, in which others are answered
        return _keep(folder, path, digest.hexdigest(), suffix, wanted)


async def _in_time(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The chunks; SlowBody where one is not there in time, as an upload that goes on holds a connection and a file."""
    while True:
        try:
            async with asyncio.timeout(CHUNK_SECONDS):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise SlowBody(f"Nothing of the data arrived for {CHUNK_SECONDS:.0f} s.") from None
        yield chunk


def _must_have_room(folder: Path, reserve: int) -> None:
    if shutil.disk_usage(folder).free < reserve:
        raise Unavailable(
            f"The server's disk has less than the {reserve / 2**30:g} GiB free that DYNOTUNE_MIN_FREE_DISK_GIB asks "
            "for, so the data was not kept."
        )


def store(folder: Path, chunks: Iterator[bytes], name: str) -> Path:
    """Store a copy of an upload, whose name holds its digest; BadUpload when it arrived damaged."""
    with _partial(folder) as (file, path):
        digest = hashlib.sha256()
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
        _to_disk(file)
        return _keep(folder, path, digest.hexdigest(), Path(name).suffix, Path(name).stem)


def find(folder: Path, name: str) -> Path:
    """The file of an upload; NotFound when there is none of that name."""
    path = folder / name
    if not UPLOADED.fullmatch(UPLOAD + name) or not path.is_file():
        raise NotFound(f"There is no upload {name[:80]!r}.")
    return path


def prune(folder: Path, owner: str, before: float, named: Callable[[], AbstractSet[str]]) -> int:
    """Delete files that were last sent or used before that time, and that are not `named`; how many.

    Only in a folder of that owner: what another database's jobs name, this one does not know.
    """
    if not _is_of(folder, owner):
        return 0
    old = [file for file in folder.glob("*") if _is_older(file, before)]
    kept = named() if old else frozenset[str]()
    gone = [file for file in old if file.name not in kept and _is_older(file, before)]
    for file in gone:
        file.unlink(missing_ok=True)  # another control plane may have been first
    return len(gone)


def _is_of(folder: Path, owner: str) -> bool:
    """Whether the folder is the owner's, which a note in it says; one that is nobody's is the owner's from now on.

    A folder of copies is taken over by whoever asks. A worker that keeps copies takes another one only when it is
    empty: what is in it may be a control plane's.
    """
    note, keeps_copies = folder / OWNER, owner.startswith(COPIES)
    try:
        noted = note.read_text() if note.exists() else ""
        is_free = noted.startswith(COPIES) or not (any(folder.iterdir()) if keeps_copies else noted)
        if is_free:
            note.write_text(owner)
            return True
    except FileNotFoundError:  # there is no such folder
        return False
    if noted != owner and not keeps_copies:
        reason = f"they belong to another database; if it is this one under another URL, delete {note}"
        log.warning("uploads are not deleted", reason=reason, database=noted)
    return noted == owner


def _is_older(file: Path, before: float) -> bool:
    try:
        return file.name != OWNER and file.is_file() and file.stat().st_mtime < before
    except FileNotFoundError:
        return False


@contextmanager
def _full_disk_is_told() -> Iterator[None]:
    """Unavailable in place of the system's error."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise Unavailable("The server's disk is full, so the data was not kept.") from error


@contextmanager
def _partial(folder: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """A file that nobody finds yet, which is gone afterwards unless it was kept."""
    folder.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=folder, prefix=".partial-")
    path = Path(name)
    try:
        with os.fdopen(number, "wb") as file:
            yield file, path
    finally:
        path.unlink(missing_ok=True)


def _to_disk(file: IO[bytes]) -> None:
    """Have what was written outlast a crash of the machine, before the file has its name."""
    file.flush()
    os.fsync(file.fileno())


def _keep(folder: Path, path: Path, digest: str, suffix: str, wanted: str | None) -> Path:
    if wanted is not None and wanted != digest:
        raise BadUpload(f"What arrived has the SHA-256 digest {digest}, not {wanted:.80}; send it again.")
    # What is kept already is replaced: sent again it counts as new, and what a crash has damaged is whole again.
    return path.replace(folder / f"{digest}{suffix}")
