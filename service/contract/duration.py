"""Durations as people write them: 3h50m, 90m, 1d."""

from __future__ import annotations

import re

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
DURATION = re.compile("".join(rf"(?:(\d{{1,9}}){unit})?" for unit in UNITS))


def seconds_of(text: str) -> int:
    """The seconds of a duration of days, hours, minutes and seconds, in this order; ValueError says what it should be.

    >>> seconds_of("3h50m")
    13800
    """
    found = DURATION.fullmatch(text.strip())
    if found is None or not any(found.groups()):
        raise ValueError(f"{text!r} is no duration; write 3h50m, 90m or 1d")
    return sum(int(number or 0) * unit for number, unit in zip(found.groups(), UNITS.values(), strict=True))
