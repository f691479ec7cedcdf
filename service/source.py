"""Which code runs: a hash over dynotune's own source, for where versions would not tell two commits apart."""

from __future__ import annotations

import hashlib
from pathlib import Path

from service import __version__


def version_of(*places: Path) -> str:
    """dynotune's version, and eight hex digits of a hash over these Python files, and those below these folders."""
    digest = hashlib.sha256()
    for place in places:
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(f"{file.relative_to(place.parent).as_posix()}\0".encode())
            digest.update(file.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:8]}"
