"""The values that a job's text is read as."""

from __future__ import annotations

from typing import Any

import pytest

from service import jobtext


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("2e-4", 0.0002),
        ("-17", -17),
        ("1.5", 1.5),
        (".5e1", 5.0),
        ("0x1F", "0x1F"),
        ("017", "017"),
        ("1_000", "1_000"),
        ("1:30:00", "1:30:00"),
        ("0x" + "f" * 5000, "0x" + "f" * 5000),
        ("1:" * 100_000 + "1", "1:" * 100_000 + "1"),  # of base 60 in YAML 1.1, and takes a minute so
        ("9" * 5000, "9" * 5000),
    ],
)
def test_numbers_are_those_of_json_and_everything_else_is_text(written: str, read: Any) -> None:
    assert jobtext.read(f"a: {written}".encode(), "The body") == {"a": read}
