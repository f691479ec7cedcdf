"""Limits how often each API key may ask."""

from __future__ import annotations

import time

from limits import RateLimitItem, parse
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from service.errors import TooMany


class RateLimit:
    """Counts the requests of each key in a moving window, in this process's memory. None allows any number."""

    def __init__(self, limit: RateLimitItem | None) -> None:
        self._limit = limit
        self._limiter = MovingWindowRateLimiter(MemoryStorage())

    def count(self, key_id: str) -> None:
        """Count a request; TooMany, with the seconds until the next is allowed, where the window is full."""
        if self._limit is None or self._limiter.hit(self._limit, key_id):
            return
        seconds = max(1.0, self._limiter.get_window_stats(self._limit, key_id).reset_time - time.time())
        raise TooMany(f"Your API key may ask {self._limit}; try again in {seconds:.0f} s.", seconds)


def rate_limit(text: str | None) -> RateLimit:
    """The limit that a text such as `600/minute` describes; ValueError where it describes none."""
    return RateLimit(parse(text) if text else None)
