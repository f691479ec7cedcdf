"""Which code runs: a hash over dynotune's own source, for where versions would not tell two commits apart."""

from __future__ import annotations

import hashlib
from pathlib import Path

from service import __version__


def version_of(*folders: Path) -> str:
    """dynotune's version, and eight hex digits of a hash over the Python files below these folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{file.relative_to(folder.parent).as_posix()}\0".encode())
            digest.update(file.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:8]}"
