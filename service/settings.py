"""Settings from the environment (DYNOTUNE_*), read once at start."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from service.contract.paths import expanded
from service.errors import Misconfigured


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes")


def _bytes(name: str, default: str) -> int:
    """A size given in GiB."""
    text = os.environ.get(name) or default
    try:
        return int(float(text) * (1 << 30))
    except (ValueError, OverflowError) as error:
        raise Misconfigured(f"{name} must be a number of GiB, not {text!r}.") from error


def _home() -> Path:
    home = expanded(os.environ.get("DYNOTUNE_HOME") or "~/.dynotune").resolve()
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            return home
    except OSError as error:
        raise Misconfigured(f"DYNOTUNE_HOME: {home} cannot be written ({error.strerror}).") from error


def _hub_cache() -> Path:
    """The hub's cache folder, by huggingface_hub's own rules (HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME)."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return expanded(cache)
    xdg = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return expanded(os.environ.get("HF_HOME", f"{xdg}/huggingface")) / "hub"


def _lock_folder() -> Path:
    """Where device locks lie: the same for everybody on the host, whatever their DYNOTUNE_HOME."""
    return Path(os.environ.get("DYNOTUNE_LOCKS", Path(tempfile.gettempdir()) / "dynotune-locks"))


@dataclass(frozen=True)
class Settings:
    """Where state lies and what is allowed. `data_roots` are the folders local models and data may come from."""

    home: Path
    database_url: str
    data_roots: tuple[Path, ...]
    hub_cache: Path = field(default_factory=_hub_cache)
    lock_folder: Path = field(default_factory=_lock_folder)
    allow_remote_code: bool = False
    allow_pickle: bool = False
    max_body_bytes: int = 1 << 20
    min_free_disk_bytes: int = 1 << 30

    @classmethod
    def from_environment(cls) -> Settings:
        """Settings of this process. Creates DYNOTUNE_HOME; Misconfigured says which variable is wrong."""
        home = _home()
        roots = os.environ.get("DYNOTUNE_DATA_ROOTS", ".").split(os.pathsep)
        return cls(
            home=home,
            database_url=os.environ.get("DYNOTUNE_DATABASE_URL") or f"sqlite:///{home / 'dynotune.db'}",
            data_roots=tuple(expanded(root).resolve() for root in roots if root),
            allow_remote_code=_flag("DYNOTUNE_ALLOW_REMOTE_CODE"),
            allow_pickle=_flag("DYNOTUNE_ALLOW_PICKLE"),
            min_free_disk_bytes=_bytes("DYNOTUNE_MIN_FREE_DISK_GIB", "1"),
        )
