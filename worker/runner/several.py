"""One process a device: started together, started again where one dies, ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from service.deaths import DEATHS_SECONDS, MOST_DEATHS_OF_A_PROCESS, Deaths


class Processes:
    """The processes of several devices. SIGTERM and Ctrl-C are passed on to all of them."""

    def __init__(self, commands: dict[str, Sequence[str]], lifeline: int) -> None:
        """`commands` are by the device's name; `lifeline` is a file descriptor that all processes inherit."""
        self._commands, self._lifeline = commands, lifeline
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._deaths = {name: Deaths() for name in commands}
        self._ending = False

    def run(self) -> int:
        """Run until all have ended; the highest of their exit codes, with 128 and more for a signal's number."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._end())
        codes = [0]
        for name in self._commands:
            if not self._ending:
                self._start(name)
        while self._running:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            if ended is not None and ended.si_pid not in {one.pid for one in self._running.values()}:
                os.waitpid(ended.si_pid, 0)  # an orphan, which is ours where this is a container's first process
                continue
            for name, process in list(self._running.items()):
                if (code := process.poll()) is None:
                    continue
                del self._running[name]
                code = code if code >= 0 else 128 - code
                if code == 0 or self._ending or not self._again(name, code):
                    codes.append(code)
        return max(codes)

    def _start(self, name: str) -> None:
        self._running[name] = subprocess.Popen(self._commands[name], pass_fds=(self._lifeline,))
        if self._ending:  # told so while it was started
            self._running[name].terminate()

    def _again(self, name: str, code: int) -> bool:
        """Start a process that died again, or end the others where it dies again and again."""
        said = f"dynotune worker: the process of {name} ended with exit code {code}"
        if (pause := self._deaths[name].pause()) is None:
            sys.stderr.write(
                f"{said}, for the {MOST_DEATHS_OF_A_PROCESS}th time within {DEATHS_SECONDS:.0f} s, so all end.\n"
            )
            self._end()
            return False
        sys.stderr.write(f"{said}; it is started again in {pause:g} s.\n")
        until = time.monotonic() + pause
        while not self._ending and time.monotonic() < until:
            time.sleep(0.05)  # a signal in between does not wait for the rest of the pause
        if not self._ending:
            self._start(name)
        return not self._ending

    def _end(self) -> None:
        self._ending = True
        for process in self._running.values():
            process.terminate()
