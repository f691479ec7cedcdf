"""Scripts of choices that change the arrangement or the process really run."""

from __future__ import annotations

import pytest

from service.exports.joining import joined, only

TEXT = '''"""Doc."""

from __future__ import annotations

import math
import random

LIMIT = 3


def used(x: int) -> float:
    """Used."""
    return math.sqrt(x) + LIMIT


def unused() -> float:
    """Unused."""
    return random.random()
'''


def test_only_what_is_used_is_kept() -> None:
    kept = only(TEXT, {"used"})
    assert "def used" in kept and "LIMIT = 3" in kept and "import math" in kept
    assert "unused" not in kept and "random" not in kept
    compile(joined([kept]), "kept", "exec")


def test_an_alias_is_not_lost_in_silence() -> None:
    with pytest.raises(AssertionError, match="alias"):
        joined(["import math as m\n\nX = m.pi\n"])
