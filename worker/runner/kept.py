"""Keeps a verification's children for its next request where that spares loading the model again.

The child's side is worker/child/again.py; docs/decisions/0028 says where it is worth it, and what it does to intervals.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from service.contract.child import EndingKind, Result, RunBlock, RunReplay, RunSoak
from worker.runner.sandbox import Child, Ending, Sandbox
from worker.runner.together import take_turns

Request = RunBlock | RunReplay | RunSoak


@dataclass(frozen=True)
class _Alive:
    """A child, what ends it, and what it has loaded."""

    child: Child
    end: contextlib.ExitStack
    base: Request


class Keeper:
    """Runs requests in children, alone or several in turns. A child that stays is asked again where its model fits.

    Only a fresh process's failure counts against a candidate: what fails in a kept one is run again in a fresh one.
    """

    def __init__(self, sandbox: Sandbox, ended: Callable[[], bool], lock_fd: int | None, cap_bytes: int | None) -> None:
        self._sandbox, self._ended, self._lock_fd, self._cap = sandbox, ended, lock_fd, cap_bytes
        self._alive: list[_Alive] = []

    def alone(self, request: Request, seconds: float) -> Ending:
        """Carry out a request while no other child is alive, and say how that ended."""

        def run() -> list[Ending]:
            return [self._start(request).watch(seconds, lambda _: None, self._ended, self._cap)]

        return self._carried_out([request], run)[0]

    def together(self, asked: Sequence[RunBlock], limits: Sequence[float]) -> list[Ending]:
        """Carry out blocks in turns while no other child is alive, and say how each ended."""
        return self._carried_out(asked, lambda: take_turns(self._start, asked, limits, self._ended, self._cap))

    def keeps_for(self, request: Request) -> bool:
        """Whether a child is alive that has loaded what the request trains."""
        return any(one.base == _base(request) for one in self._alive)

    def close(self) -> None:
        """End all children."""
        self._keep([])

    def _carried_out(self, asked: Sequence[Request], run: Callable[[], list[Ending]]) -> list[Ending]:
        self._keep(asked)
        is_kept = bool(self._alive)
        endings = run()
        if is_kept and any(one.kind not in (EndingKind.result, EndingKind.ended) for one in endings):
            self.close()
            before, endings = endings, run()
            for one, failed in zip(endings, before, strict=True):
                one.log = failed.log + one.log
        pairs = zip(asked, endings, strict=True)
        self._keep([request for request, one in pairs if isinstance(one.last, Result) and one.last.stays])
        return endings

    def _start(self, request: Request) -> Child:
        """The child that has loaded what the request trains, asked again, or else a new one."""
        for one in self._alive:
            if one.base == _base(request) and not isinstance(request, RunSoak):
                one.child.again(request)
                return one.child
        end = contextlib.ExitStack()
        child = end.enter_context(self._sandbox.started(request, self._lock_fd))
        self._alive.append(_Alive(child, end, _base(request)))
        return child

    def _keep(self, requests: Sequence[Request]) -> None:
        """End the children but for those that have loaded what one of the requests trains."""
        bases = [_base(request) for request in requests]
        for one in [one for one in self._alive if one.base not in bases]:
            self._alive.remove(one)
            one.end.close()


def _base(request: Request) -> Request:
    """The request without what `RunAgain` may change of it: requests with equal bases train the same model."""
    configuration = request.candidate.configuration.model_copy(update={"learning_rate": 1.0})
    changes: dict[str, Any] = {"candidate": request.candidate.model_copy(update={"configuration": configuration})}
    if isinstance(request, RunBlock):
        changes |= {"seed": 0, "block": 0, "in_turns": False, "stays": False}
    elif isinstance(request, RunReplay):
        changes |= {"seed": 0, "count": 0, "steps": (), "samples_a_step": 1, "first_samples": 0, "stays": False}
    return request.model_copy(update=changes)
