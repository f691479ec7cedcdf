"""How often a command looks for garbage: a short one imports and ends, and a server runs for long."""

from __future__ import annotations

import atexit
import gc
import sys

USUAL = gc.get_threshold()


def be_short() -> None:
    """Leave out what a short command has no use for; `python -m benchmarks.start_up` tells how long one takes.

    It hardly looks for garbage among what it imports, and not at its end. And httpx goes without its own command line,
    which it imports, with rich's highlighting of code, wherever rich and click are installed.
    """
    gc.set_threshold(50_000, 20, 20)
    atexit.register(gc.freeze)
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]


def run_for_long() -> None:
    """Look for garbage as often as Python does unasked."""
    gc.set_threshold(*USUAL)
