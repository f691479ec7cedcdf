"""Trial children for tests: the real sandbox and worker around them, no torch in them.

Each has the signature of worker.child.entry.main.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from service.contract.child import (
    ORDER,
    REQUEST,
    ChildMessage,
    Paused,
    Prepared,
    Preparing,
    ProbeStarted,
    Progress,
    Result,
    RunAgain,
    RunBlock,
    RunEstimate,
    RunReplay,
    RunSoak,
    RunTrial,
    Turn,
)
from service.contract.estimate import Estimate
from service.contract.measurement import Soak
from tests.factory import block, measured, replay
from worker.child.isolation import isolate


class PanicException(BaseException):
    """As pyo3 makes one of a Rust library's panic: it is no Exception."""


def say(messages: Connection, message: ChildMessage) -> None:
    messages.send_bytes(message.model_dump_json().encode())


def _answer(asked: bytes, messages: Connection) -> None:
    request = REQUEST.validate_json(asked)
    say(messages, Progress(text="stub"))
    if isinstance(request, RunEstimate):
        memory, device = request.request.memory_gib, request.facts.device
        say(
            messages,
            Result(
                estimate=Estimate(
                    memory_gib=memory, max_length=8, device=device, methods={}, seconds=0.1, statement="stub"
                )
            ),
        )
        return
    say(messages, _result(request))


def _result(request: RunTrial | RunBlock | RunReplay | RunSoak) -> Result:
    configuration = (request.trial if isinstance(request, RunTrial) else request.candidate).configuration
    made = measured(configuration, 5.0 + int(configuration.key[:2], 16) / 100)
    if isinstance(request, RunBlock):
        seconds = made.timing.seconds if made.timing else 1.0
        return Result(block=block(made, seconds, request.block))
    if isinstance(request, RunReplay):
        return Result(replay=replay(request.samples_a_step))
    if isinstance(request, RunSoak):
        return Result(soak=Soak(steps=4, worst_case_steps=2))
    return Result(measurement=made)


def quick(request: bytes, messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Answers at once."""
    isolate(lifeline, scratch)
    _answer(request, messages)


def collecting(request: bytes, messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Answers at once if this process collects garbage, but not what the fork server has imported without doing so."""
    assert gc.isenabled() and gc.get_freeze_count() > len(sys.modules), "or it ends without a word"
    quick(request, messages, lifeline, scratch, _lock)


def needing_cuda(request: bytes, messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Answers at once where nothing has taken CUDA from this process; ends without a word where something has."""
    assert "tests.spoiling" not in sys.modules
    quick(request, messages, lifeline, scratch, _lock)


def turning(request: bytes, messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Takes turns and writes them down. The candidate with packed rows dies in its second turn."""
    isolate(lifeline, scratch)
    asked = REQUEST.validate_json(request)
    assert isinstance(asked, RunBlock) and asked.in_turns
    batching = asked.candidate.configuration.levers["batching"]
    say(messages, Paused())
    for number in range(1, 1000):
        turn = Turn.model_validate_json(messages.recv_bytes())
        with (Path(os.environ["DYNOTUNE_LOCKS"]) / "turns").open("a") as turns:
            turns.write(f"{batching} {turn.passes:.2f}\n")
        if batching == "packed" and number == 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        if turn.last:
            break
        say(messages, Paused())
    _answer(request, messages)


def as_timed(request: bytes, messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Takes turns, and is as fast in a block as its candidate's trial was; which ones took turns is written down."""
    isolate(lifeline, scratch)
    asked = REQUEST.validate_json(request)
    if not isinstance(asked, RunBlock):
        _answer(request, messages)
        return
    with (Path(os.environ["DYNOTUNE_LOCKS"]) / "blocks").open("a") as blocks:
        blocks.write(f"{asked.block} {asked.in_turns} {asked.candidate.configuration.key}\n")
    over = not asked.in_turns
    while not over:
        say(messages, Paused())
        over = Turn.model_validate_json(messages.recv_bytes()).last
    assert asked.candidate.timing is not None
    say(messages, Result(block=block(asked.candidate, asked.candidate.timing.seconds, asked.block)))


def staying(
    request: bytes, messages: Connection, lifeline: Connection, scratch: str, _lock: object, dies_at: int = 0
) -> None:
    """Answers, stays where it may, and writes down its process and what it is asked; it may die of a later request."""
    isolate(lifeline, scratch)
    asked = REQUEST.validate_json(request)
    for number in range(1000):
        assert isinstance(asked, RunBlock | RunReplay | RunSoak)
        with (Path(os.environ["DYNOTUNE_LOCKS"]) / "served").open("a") as served:
            served.write(f"{os.getpid()} {asked.seed}\n")
        print(f"seed {asked.seed}", flush=True)
        if number and number == dies_at:
            os.kill(os.getpid(), signal.SIGSEGV)
        if isinstance(asked, RunBlock) and asked.in_turns:
            say(messages, Paused())
            while not Turn.model_validate_json(messages.recv_bytes()).last:
                say(messages, Paused())
        stays = not isinstance(asked, RunSoak) and asked.stays
        say(messages, _result(asked).model_copy(update={"stays": stays}))
        if not stays:
            return
        order = ORDER.validate_json(messages.recv_bytes())
        assert isinstance(order, RunAgain)
        asked = order.request


def contending(request: bytes, messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """A trial on a machine whose pace is in a file: its seconds are as slow as that, alone and in turns.

    It writes down its process, and when it takes turns. Packed rows die of their second request.
    """
    isolate(lifeline, scratch)
    asked, place = REQUEST.validate_json(request), Path(os.environ["DYNOTUNE_LOCKS"])
    assert isinstance(asked, RunTrial)
    batching = asked.trial.configuration.levers["batching"]
    truth = {"padded": 10.0, "sorted": 9.8, "grouped": 20.0, "token-budget": 5.0}.get(batching, 10.0)

    def seconds() -> float:
        return truth * float((place / "pace").read_text())

    result = Result(measurement=measured(asked.trial.configuration, seconds()))
    with (place / "trials").open("a") as trials:
        trials.write(f"{os.getpid()} {batching}\n")
    while asked.stays:
        say(messages, result.model_copy(update={"stays": True}))
        order = ORDER.validate_json(messages.recv_bytes())
        assert isinstance(order, RunAgain) and isinstance(order.request, RunBlock) and order.request.in_turns
        if batching == "packed":
            os.kill(os.getpid(), signal.SIGSEGV)
        say(messages, Paused())
        while not Turn.model_validate_json(messages.recv_bytes()).last:
            say(messages, Paused())
        result = Result(block=block(order.request.candidate, seconds(), order.request.block))
    say(messages, result)


def staying_once(request: bytes, messages: Connection, lifeline: Connection, scratch: str, lock: object) -> None:
    """Dies of the second request that it gets."""
    staying(request, messages, lifeline, scratch, lock, dies_at=1)


def exclusive(request: bytes, messages: Connection, lifeline: Connection, scratch: str, lock: object) -> None:
    """Answers, and says if another child is on the device at the same time."""
    isolate(lifeline, scratch)
    inside = Path(os.environ["DYNOTUNE_LOCKS"]) / "inside"
    with (Path(os.environ["DYNOTUNE_LOCKS"]) / "overlaps").open("a") as overlaps:
        try:
            handle = os.open(inside, os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            overlaps.write("two at once\n")
        else:
            time.sleep(0.05)  # long enough to be seen by another
            os.close(handle)
            inside.unlink()
    _answer(request, messages)


def segfault(_request: bytes, messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Dies as a broken kernel would."""
    isolate(lifeline, scratch)
    print("last words", flush=True)
    say(messages, ProbeStarted(micro_batch_size=4))
    os.kill(os.getpid(), signal.SIGSEGV)


def talking(request: bytes, messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Prints a line, and then another for each file that appears beside the locks; never ends."""
    isolate(lifeline, scratch)
    for number in range(1000):
        while number and not (Path(os.environ["DYNOTUNE_LOCKS"]) / f"say-{number}").exists():
            time.sleep(0.02)
        print(f"line {number}", flush=True)


def prepares(request: bytes, messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Downloads before it answers."""
    isolate(lifeline, scratch)
    say(messages, Preparing())
    say(messages, Prepared())
    _answer(request, messages)


def hang(request: bytes, messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Never ends, and has a child of its own. Says its pids first."""
    isolate(lifeline, scratch)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    say(messages, Progress(text=f"{os.getpid()} {child.pid}"))
    threading.Event().wait()


def stubborn(_request: bytes, messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Never ends, heeds no SIGTERM, and has a child in a session of its own. Says its pids first."""
    isolate(lifeline, scratch)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    say(messages, Progress(text=f"{os.getpid()} {child.pid}"))
    threading.Event().wait()


def flooding(_request: bytes, _messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Prints without end."""
    isolate(lifeline, scratch)
    while True:
        os.write(1, b"x" * (1 << 20))


def silent(_request: bytes, _messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Ends without a word."""
    isolate(lifeline, scratch)
    os._exit(7)


class Pickled:
    """Touches a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(os.environ["DYNOTUNE_LOCKS"]),)


def hostile(_request: bytes, messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Sends a pickle, as a model's own code could."""
    isolate(lifeline, scratch)
    messages.send(Pickled())
    threading.Event().wait()


def stammering(_request: bytes, messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Sends the beginning of a message, and never the rest."""
    isolate(lifeline, scratch)
    os.write(messages.fileno(), (1000).to_bytes(4, "big") + b"{")
    threading.Event().wait()


def babbling(_request: bytes, messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Sends JSON that is no message."""
    isolate(lifeline, scratch)
    messages.send_bytes(b'{"kind": "result", "measurement": {"outcome": "splendid"}}')
    threading.Event().wait()


def greedy(request: bytes, messages: Connection, lifeline: Connection, scratch: str, lock: object) -> None:
    """The real child, on the real device under its real cap, but for a trial that allocates without end."""
    import torch

    from worker.child import entry, measure

    def allocate(*_: object) -> None:
        say(messages, ProbeStarted(micro_batch_size=1))
        kept = []
        while True:
            kept.append(torch.ones(1 << 22))

    measure.run_trial = allocate  # type: ignore[assignment]
    entry.main(request, messages, lifeline, scratch, lock)


def escaping(request: bytes, messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Takes memory where its own cap does not count: shared with a process of its own."""
    isolate(lifeline, scratch)
    say(messages, ProbeStarted(micro_batch_size=1))
    held = mmap.mmap(-1, 1 << 30)  # MAP_SHARED
    for at in range(0, 1 << 30, 4096):
        held[at] = 1
    threading.Event().wait()


def _raising(error: BaseException, size: int, request: bytes, messages: Connection, *rest: object) -> None:
    """The real entry, of a trial that raises at a micro batch."""
    from worker.child import entry

    def fail(*_: object) -> Result:
        say(messages, ProbeStarted(micro_batch_size=size))
        raise error

    entry._run = fail  # type: ignore[assignment]
    entry.main(request, messages, *rest)  # type: ignore[arg-type]


def illegal(request: bytes, messages: Connection, lifeline: Connection, scratch: str, lock: object) -> None:
    """A kernel that reads where it must not: torch says so, and the context is lost."""
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    _raising(error, 8, request, messages, lifeline, scratch, lock)


def panic(request: bytes, messages: Connection, lifeline: Connection, scratch: str, lock: object) -> None:
    """A Rust library that panics of a mistake of its own."""
    _raising(PanicException("no entry found for key"), 8, request, messages, lifeline, scratch, lock)


def cramped(request: bytes, messages: Connection, lifeline: Connection, scratch: str, lock: object) -> None:
    """The real child, where a tokenizer is refused the memory for its threads: it panics, and the environment asks it
    for a backtrace, which needs more memory still."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RUST_BACKTRACE": "1"}
    from worker.child import entry, measure

    def tokenise(*_: object) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(Path(__file__).parent.parent / "examples" / "llama-13m" / "tokenizer.json"))
        texts = ["def return value " * 200] * 2000
        held = proc_status()["VmData"]
        resource.setrlimit(resource.RLIMIT_DATA, (held + (7 << 20), resource.RLIM_INFINITY))
        tokenizer.encode_batch(texts)

    from worker.devices.base import proc_status

    measure.run_trial = tokenise  # type: ignore[assignment]
    entry.main(request, messages, lifeline, scratch, lock)


def without_pages(_request: bytes, _messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """bitsandbytes, which ends the process where there is no memory for the pages of an optimizer's states."""
    isolate(lifeline, scratch)
    print("Error out of memory at line 93 in file /src/csrc/pythonInterface.cpp", file=sys.stderr, flush=True)
    os._exit(1)


def without_threads(_request: bytes, _messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """OpenMP, which ends the process where a tight cap has no room for the stacks of its threads."""
    isolate(lifeline, scratch)
    print("\nlibgomp: Thread creation failed: Resource temporarily unavailable", file=sys.stderr, flush=True)
    os._exit(1)


def aborting(_request: bytes, _messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """A Rust library that ends the process when it is refused memory, as tokenizers does under a tight cap."""
    isolate(lifeline, scratch)
    print("memory allocation of 69648 bytes failed", file=sys.stderr, flush=True)
    os.abort()
