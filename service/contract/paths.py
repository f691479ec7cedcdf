"""Which local paths a job may read: below the data roots or the hub's cache. Pure path arithmetic."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from service.rows import ENDINGS

UPLOAD = "upload:"  # before the name of data that was sent to the control plane
UPLOADED = re.compile(rf"{UPLOAD}[0-9a-f]{{64}}\.[a-z]+")


def expanded(source: str) -> Path:
    """The path with `~` replaced; left as it is where there is no such user."""
    try:
        return Path(source).expanduser()
    except RuntimeError:
        return Path(source)


@dataclass(frozen=True)
class Roots:
    """The folders that local models and data may come from; relative paths start at the first of them."""

    folders: tuple[Path, ...]
    hub_cache: Path
    uploads: Path | None = None

    def resolve(self, source: str) -> Path:
        """The path that a source stands for; a relative path starts at the first root."""
        if self.uploads is not None and UPLOADED.fullmatch(source):
            return self.uploads / source.removeprefix(UPLOAD)
        path = expanded(source)
        if not path.is_absolute() and self.folders:
            path = self.folders[0] / path
        return Path(os.path.normpath(path))

    def holds(self, source: str, path: Path) -> bool:
        """Whether a file of that source may be read: it lies, symlinks followed, below an allowed folder.

        The hub's cache links its snapshots to blobs inside itself, so both ends are below it. What users have sent is
        found by its name alone, which only its sender knows, and never by its path.
        """
        real = Path(os.path.realpath(path))  # a loop of links is left as it is, and told where it is opened
        if self.uploads is not None and real.is_relative_to(self.uploads.resolve()):
            return UPLOADED.fullmatch(source) is not None and path == self.resolve(source)
        return any(real.is_relative_to(folder.resolve()) for folder in (*self.folders, self.hub_cache))


def looks_local(source: str) -> bool:
    """Whether a source is meant as a path rather than a hub id (`name` or `owner/name`)."""
    if source.startswith(UPLOAD):
        return True
    ending = Path(source).suffix in ENDINGS
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or ending


def outside(field: str, source: str, path: Path, roots: Roots) -> str | None:
    """A sentence when a file of that source is not allowed, else None."""
    if roots.holds(source, path):
        return None
    allowed = ", ".join(str(folder) for folder in roots.folders)
    return f"{field}: {path} lies outside the allowed folders ({allowed}); DYNOTUNE_DATA_ROOTS on the server sets them"
