"""`dynotune trials --log`: prints what a trial's process has printed, and with --follow goes on until it has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from service.cli.common import screen
from service.contract.states import TaskState

if TYPE_CHECKING:
    from service.client import Client

LOOK_SECONDS = 1.0  # between two looks; a worker hands on what is printed every two seconds
MARK_CHARACTERS = 200  # that were printed last: what follows them in the next answer is new


def show(client: Client, trial_id: str, follow: bool) -> None:
    """Print what the trial has printed so far, or with `follow` all that it prints until it has ended."""
    console, printed = screen(), False
    for text in _lines(client, trial_id) if follow else [client.trial(trial_id).log or ""]:
        console.print(text, soft_wrap=True, end="")
        printed = printed or bool(text)
    console.print("" if printed else "(it printed nothing)")


def _lines(client: Client, trial_id: str) -> Iterator[str]:
    seen = ""
    while True:
        trial = client.trial(trial_id)
        yield added(seen, trial.log or "")
        seen = trial.log or seen
        if trial.state not in (TaskState.queued, TaskState.running):
            return
        time.sleep(LOOK_SECONDS)


def added(seen: str, log: str) -> str:
    """What a log has gained since it was `seen`: it grows at its end, and its beginning is cut off when it is long."""
    if log.startswith(seen):
        return log[len(seen) :]
    mark = seen[-MARK_CHARACTERS:]
    found = log.rfind(mark)
    return log[found + len(mark) :] if found >= 0 else log
