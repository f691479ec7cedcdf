"""How often Python collects garbage: seldom in a command that ends soon, as usual in a server."""

from __future__ import annotations

import atexit
import gc
import sys

USUAL = gc.get_threshold()


def be_short() -> None:
    """Leave out what a short command has no use for; `python -m benchmarks.start_up` tells how long one takes.

    Garbage is hardly collected during imports, and not at the end. And httpx goes without its own command line, which
    it imports, with rich's highlighting of code, wherever rich and click are installed.
    """
    gc.set_threshold(50_000, 20, 20)
    atexit.register(gc.freeze)
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]


def run_for_long() -> None:
    """Collect garbage as often as Python does by default."""
    gc.set_threshold(*USUAL)
