"""Regular expressions of users: a mistake is one sentence, and none takes longer than it may."""

from __future__ import annotations

import signal

import pytest

from training.errors import TrainingError
from worker.child.patterns import check_pattern

NAMES = [f"model.layers.{number}.self_attn.q_proj" for number in range(32)]


def test_an_ordinary_pattern_passes_and_leaves_no_alarm() -> None:
    """With a bracket that is left open it does not pass."""
    pattern, before = r".*\.(q|v)_proj", signal.getsignal(signal.SIGALRM)
    check_pattern(pattern, NAMES)
    assert signal.getsignal(signal.SIGALRM) is before
    with pytest.raises(TrainingError, match="is no regular expression"):
        check_pattern(f"{pattern}(", NAMES)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(.|.)*$x", "has not matched the names of the model's modules within 0.2 s"),
        ("(.*)*(.*)*(.*)*(.*)*!", "write a simpler one"),
        ("(q_proj", "is no regular expression"),
    ],
)
def test_a_mistake_is_told_in_time(pattern: str, words: str) -> None:
    """Without the alarm, the first two take minutes and more, and this suite's own time limit ends them."""
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TrainingError, match="lora.target_modules") as told:
        check_pattern(pattern, NAMES, seconds=0.2)
    assert words in str(told.value)
    assert signal.getsignal(signal.SIGALRM) is before
