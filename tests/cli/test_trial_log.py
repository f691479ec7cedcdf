"""What `dynotune trials --follow` takes as new in a log, of which only the end is kept."""

from __future__ import annotations

import pytest

from service.cli.trial_log import added

LONG = "".join(f"line {number}\n" for number in range(100))


@pytest.mark.parametrize(
    ("seen", "log", "new"),
    [
        ("", "a\n", "a\n"),
        ("a\n", "a\nb\n", "b\n"),
        ("a\n", "a\n", ""),
        (LONG, LONG[300:] + "more\n", "more\n"),  # its beginning was cut off
        ("the first child\n", "the second\n", "the second\n"),  # after an out-of-memory error another child goes on
        ("the second\n", "the first child\nthe second\nits end\n", "its end\n"),  # what is kept in the end has both
    ],
)
def test_what_a_log_has_gained(seen: str, log: str, new: str) -> None:
    assert added(seen, log) == new
