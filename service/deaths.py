"""When a worker's process that died is started again, by `serve` and `worker --devices`, and when it is given up."""

from __future__ import annotations

import time

FIRST_PAUSE_SECONDS = 1.0
MOST_DEATHS_OF_A_PROCESS, DEATHS_SECONDS = 5, 60.0


class Deaths:
    """The deaths of one process, and of those that were started in its place."""

    def __init__(self) -> None:
        self._moments: list[float] = []

    def pause(self) -> float | None:
        """Count a death; the seconds to wait before another process is started, twice as many with each death.

        None where it is to be given up: after MOST_DEATHS_OF_A_PROCESS deaths within DEATHS_SECONDS.
        """
        now = time.monotonic()
        self._moments = [*(at for at in self._moments if now - at < DEATHS_SECONDS), now]
        count = len(self._moments)
        return None if count >= MOST_DEATHS_OF_A_PROCESS else FIRST_PAUSE_SECONDS * 2 ** (count - 1)
