"""Ways to start workers on a cluster: one launcher a file, found by being in this folder.

Workers need nothing of a cluster's scheduler but to be started beside a device: they lease their tasks from the
database. A launcher therefore only writes the file that starts them, and hands it in if asked.
"""

from __future__ import annotations

from collections.abc import Callable

from service.folders import declared


def discover() -> dict[str, Callable[..., None]]:
    """The command of every file of this folder that declares one as LAUNCH, by the file's name."""
    return declared(__name__, __path__, "LAUNCH", helpers=("base",))


__all__ = ["discover"]
