"""`dynotune`: a client of the API; `serve` and `tune` also start the control plane and the worker."""

from __future__ import annotations

import atexit
import gc
import sys

# A short command imports and ends. Looking for garbage among what it imports, then and at its end, takes a tenth of its
# time, as does httpx's own command line, which httpx imports where rich and click are installed.
gc.set_threshold(50_000, 20, 20)
atexit.register(gc.freeze)
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]  # httpx then goes without it

from service.cli.app import main  # noqa: E402

__all__ = ["main"]
