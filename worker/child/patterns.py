"""Matches a user's regular expression in bounded time: some need longer than anyone waits, such as `(.|.)*$x`."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterable, Iterator
from types import FrameType

from training.errors import TrainingError

SECONDS = 2.0  # for all names of a model's modules together


def check_pattern(pattern: str, names: Iterable[str], seconds: float = SECONDS) -> None:
    """TrainingError when `target_modules` is no regular expression, or does not match all names in time.

    peft matches it with `re.fullmatch` (peft.tuners.tuners_utils.check_target_module_exists), which has no limit of its
    own. Python's matcher looks for signals while it works, so an alarm ends it; this runs in the main thread only.
    """
    try:
        with _alarm(seconds):
            compiled = re.compile(pattern)
            for name in names:
                compiled.fullmatch(name)
    except re.error as error:
        raise TrainingError(f"lora.target_modules: {pattern!r:.80} is no regular expression ({error})") from error
    except TimeoutError as error:
        text = f"{pattern!r:.80} has not matched the names of the model's modules within {seconds:g} s"
        raise TrainingError(f"lora.target_modules: {text}; write a simpler one, or a list of names") from error


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread after that time. Puts back the handler and the timer that were there."""

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    handler = signal.signal(signal.SIGALRM, ring)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, handler)
