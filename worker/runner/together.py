"""The worker's side of taking turns: candidates that are alive at the same time train in turns of about two seconds.

What slows a shared machine then slows all of them alike, so their ratios hold where blocks of minutes would drift
(worker/child/turns.py is the other side).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from service.contract.child import EndingKind, RunBlock, Turn
from service.contract.hardware import HardwareFacts
from service.contract.measurement import Measurement, Timing
from service.contract.task import block_passes
from worker.runner.sandbox import Child, Ending

TURN_SECONDS = 2.0  # of the slowest candidate
LEAST_TURNS = 8  # a pass: the interval of a ratio comes from the spread between the turns
MOST_MEMORY = 0.85  # of the device's memory, for all candidates together
CONTEXT_BYTES = 700 << 20  # what a process takes of a GPU beside its tensors: its CUDA context and kernels


def fit_together(candidates: Sequence[Measurement], facts: HardwareFacts) -> bool:
    """Whether all candidates may be alive at once: the device serves several processes, and has memory for them."""
    if facts.for_one_process or any(one.peak_bytes is None for one in candidates):
        return False
    extra = CONTEXT_BYTES if facts.has_own_memory else 0
    taken = sum((one.peak_bytes or 0) - one.unread_bytes + extra for one in candidates)  # those bytes are not touched
    return taken <= MOST_MEMORY * facts.memory_bytes


def groups(first: Measurement, others: Sequence[Measurement], facts: HardwareFacts) -> list[list[Measurement]]:
    """The others in groups that each fit into the device's memory together with the first; one alone at least."""
    found: list[list[Measurement]] = []
    for one in others:
        if found and fit_together([first, *found[-1], one], facts):
            found[-1].append(one)
        else:
            found.append([one])
    return found


def course(
    timings: Sequence[Timing], micro_batches: Sequence[int], minutes: float, passes: int | None = None
) -> tuple[int, int]:
    """(passes, turns) of a block of candidates with these timings and numbers of micro batches a pass.

    Without `passes`, the work unit is trained as often as a block of a job of so many minutes asks for.
    """
    slowest = max(timing.seconds for timing in timings)
    passes = passes or block_passes(slowest, minutes)
    turns = max(LEAST_TURNS, math.ceil(passes * slowest / TURN_SECONDS))
    return passes, max(1, min(turns, passes * min(micro_batches)))


def take_turns(
    start: Callable[[RunBlock], Child],
    asked: Sequence[RunBlock],
    limits: Sequence[float],
    ended: Callable[[], bool],
    cap_bytes: int | None,
    passes: int | None = None,
) -> list[Ending]:
    """Run the blocks at the same time, in turns, and say how each child ended.

    Each trains the work unit in so many passes; by default in as many as the slowest needs to be timed long enough.

    `start` has a child begin with a request. `limits` are the seconds that each child may take to get ready, and as
    long again for each of its turns. A child that fails is out; the others go on.
    """
    passes, turns = _course(asked, passes)
    endings: dict[int, Ending] = {}
    children: list[Child] = []

    def wait(number: int) -> None:
        ending = children[number].until_paused(limits[number], ended, cap_bytes)
        if ending is not None:
            endings[number] = ending

    for number, request in enumerate(asked):
        children.append(start(request))
        wait(number)
    for turn in range(1, turns + 1):
        # Every other round goes backwards, so that a pace that only falls favours no candidate.
        for number in range(len(asked)) if turn % 2 else reversed(range(len(asked))):
            if number not in endings:
                children[number].order(Turn(passes=passes * turn / turns, last=turn == turns))
                wait(number)
        if any(ending.kind is EndingKind.ended for ending in endings.values()):
            break
    return [endings.get(number, Ending(EndingKind.ended)) for number in range(len(asked))]


def _course(asked: Sequence[RunBlock], passes: int | None) -> tuple[int, int]:
    timed = [request.candidate for request in asked if request.candidate.timing]
    timings = [one.timing for one in timed if one.timing]
    counts = [(one.gradient_accumulation_steps or 1) * one.timing.steps for one in timed if one.timing]
    return course(timings, counts, asked[0].spec.search.minutes, passes) if timed else (1, LEAST_TURNS)
