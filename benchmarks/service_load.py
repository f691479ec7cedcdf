"""What the control plane bears over HTTP: submissions, many who poll, many streams, and its memory.

A real `dynotune serve` (uvicorn, no local worker) gets 10,000 jobs, and then 200 clients that ask for their job every
two seconds, as `Client.wait` does, and 50 event streams, while a worker's process claims and ends 20 jobs a second.
`benchmarks.queue_load` runs this on both databases.

The clients are one process with raw sockets, as 250 real clients would take more of the machine than the service.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.store import say
from service.contract.hardware import HardwareFacts
from service.contract.task import PlanClaim, PlanDecision, TaskKind
from service.db import connect
from service.queue import Queue
from tests.processes import serving

JOBS, CONNECTIONS = 10_000, 8
POLLERS, POLL_SECONDS, STREAMS, ENDS_PER_SECOND = 200, 2.0, 50, 20.0
BODY = json.dumps({"model": {"source": "m"}, "dataset": {"source": "hub"}}).encode()
SEPARATOR = b"\r\n\r\n"
FACTS = HardwareFacts(
    host="here",
    device="cpu",
    name="a CPU",
    memory_bytes=1 << 34,
    cores=2,
    bf16_native=False,
    versions={},
    packages={},
)
ENDED = PlanDecision(finish=True, error="It was made to be ended.")


class Connection:
    """One kept-alive connection to the service."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> Connection:
        """Connect; the connection itself."""
        self.reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def send(self, method: str, path: str, body: bytes = b"", accept: str = "application/json") -> int:
        """Send a request and read its answer's head; the length of the answer's body, -1 where it is a stream.

        RuntimeError unless the status is 2xx.
        """
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nAccept: {accept}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        answer = (await self.reader.readuntil(SEPARATOR)).decode().lower()
        if not answer.startswith("http/1.1 2"):
            raise RuntimeError(answer + (await self.reader.read(1000)).decode())
        _, found, length = answer.partition("content-length: ")
        return int(length.partition("\r\n")[0]) if found else -1

    async def ask(self, method: str, path: str, body: bytes = b"") -> Any:
        """Send a request; the JSON of its answer."""
        return json.loads(await self.reader.readexactly(await self.send(method, path, body)))

    def close(self) -> None:
        """End the connection."""
        self._writer.close()


async def submit(port: int, count: int, connections: int) -> tuple[list[str], float]:
    """Submit that many jobs over that many connections; their ids in order, and jobs a second."""
    left, ids = itertools.count(), []
    opened = [await Connection(port).open() for _ in range(connections)]

    async def one(connection: Connection) -> None:
        while next(left) < count:
            ids.append((await connection.ask("POST", "/v1/jobs", BODY))["id"])

    began = time.perf_counter()
    await asyncio.gather(*map(one, opened))
    taken = time.perf_counter() - began
    for connection in opened:
        connection.close()
    return ids, count / taken


def end_jobs(url: str, seconds: float, ready: Any) -> None:
    """Claim and end the first jobs of the queue, so many a second, as a worker's process."""
    queue = Queue(connect(url))
    queue.register("load", os.getpid(), FACTS)
    ready.set()
    began = time.monotonic()
    for number in range(int(seconds * ENDS_PER_SECOND)):
        time.sleep(max(0.0, began + number / ENDS_PER_SECOND - time.monotonic()))
        claim = queue.claim("load", (TaskKind.plan,))
        assert isinstance(claim, PlanClaim)
        queue.finish_plan(claim, ENDED)


async def poll(port: int, job_id: str, until_time: float, times: list[float]) -> None:
    """Ask for a job every two seconds; each answer's milliseconds. The first request is not counted: it connects."""
    connection = await Connection(port).open()
    await asyncio.sleep(random.uniform(0, POLL_SECONDS))
    await connection.ask("GET", f"/v1/jobs/{job_id}")
    while time.time() < until_time:
        await asyncio.sleep(POLL_SECONDS)
        began = time.perf_counter()
        await connection.ask("GET", f"/v1/jobs/{job_id}")
        times.append(1000 * (time.perf_counter() - began))
    connection.close()


async def stream(port: int, job_id: str, delays: list[float]) -> None:
    """Read a job's events until it has ended; how many milliseconds after it happened each new one arrives."""
    connection = await Connection(port).open()
    await connection.send("GET", f"/v1/jobs/{job_id}/events/stream", accept="text/event-stream")
    opened = time.time()
    while line := await connection.reader.readline():
        if line.startswith(b"data: ") and b'"at"' in line:
            event = json.loads(line.removeprefix(b"data: "))
            if event["at"] > opened:
                delays.append(1000 * (time.time() - event["at"]))
            if event["kind"] == "failed":
                break
    connection.close()


async def observed(port: int, url: str, ids: list[str], seconds: float) -> dict[str, float]:
    """How long polls take and how late events come, with all the pollers and streams."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    worker = context.Process(target=end_jobs, args=(url, seconds, ready))
    worker.start()
    ready.wait()
    times: list[float] = []
    delays: list[float] = []
    ended = int(seconds * ENDS_PER_SECOND)
    # Each stream's job ends during the measurement, one after the other; pollers ask for jobs at the queue's end.
    told = [ids[(number + 1) * ended // (STREAMS + 1)] for number in range(STREAMS)]
    streams = [asyncio.create_task(stream(port, job_id, delays)) for job_id in told]
    until_time = time.time() + seconds + POLL_SECONDS
    pollers = [asyncio.create_task(poll(port, job_id, until_time, times)) for job_id in ids[-POLLERS:]]
    await asyncio.gather(*pollers)
    await asyncio.wait_for(asyncio.gather(*streams), 60)
    worker.join()
    return {
        "polls_per_s": len(times) / seconds,
        "poll_p50_ms": statistics.median(times),
        "poll_p99_ms": statistics.quantiles(times, n=100)[-1],
        "event_delay_p50_ms": statistics.median(delays),
        "event_delay_p99_ms": statistics.quantiles(delays, n=100)[-1],
    }


def measured(url: str, seconds: float) -> dict[str, float]:
    """All figures of the control plane on an empty database. `seconds` is the length of the polling."""
    with (
        tempfile.TemporaryDirectory() as home,
        serving(Path(home), {"DYNOTUNE_DATABASE_URL": url, "DYNOTUNE_HOME": home}) as (port, pid),
    ):
        process = psutil.Process(pid)
        warm, _ = asyncio.run(submit(port, 100, 1))
        before = process.memory_info().rss
        first, alone = asyncio.run(submit(port, 500, 1))
        more, together = asyncio.run(submit(port, JOBS - 600, CONNECTIONS))
        after = process.memory_info().rss
        found = {"submits_per_s": alone, f"submits_per_s_{CONNECTIONS}_connections": together}
        found |= {"memory_mib": before / 2**20, f"memory_mib_after_{JOBS}_jobs": after / 2**20}
        say(f"submitted {alone:.0f} and {together:.0f} a second; {before >> 20} and {after >> 20} MiB")
        found |= asyncio.run(observed(port, url, warm + first + more, seconds))
        found["memory_mib_with_all"] = process.memory_info().rss / 2**20
        return found
