"""How long `dynotune` takes to start: the medians of ten starts of `--help`, and of `ls` on a server that is idle.

python -m benchmarks.start_up [--starts 10] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMMAND = (sys.executable, "-m", "service.cli")
WAIT_SECONDS = 60.0


def seconds(arguments: tuple[str, ...], environment: dict[str, str]) -> float:
    """Wall-clock of one start that succeeds."""
    began = time.perf_counter()
    subprocess.run([*COMMAND, *arguments], env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def wait_for(server: subprocess.Popen[bytes], port: int) -> None:
    """Wait until the server listens; exits with a sentence when it ends or takes too long."""
    deadline = time.monotonic() + WAIT_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    sys.exit("the server did not start")


def main() -> None:
    """Start a server without a worker, time the commands in turn, print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    commands = {"dynotune --help": ("--help",), "dynotune ls": ("ls", "--url", f"http://127.0.0.1:{port}")}
    times: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "DYNOTUNE_HOME": home}
        serve = [*COMMAND, "serve", "--no-worker", "--port", str(port)]
        server = subprocess.Popen(serve, env=environment, stderr=subprocess.DEVNULL)
        try:
            wait_for(server, port)
            for _ in range(options.starts):
                for name, arguments in commands.items():
                    times[name].append(seconds(arguments, environment))
        finally:
            server.terminate()
            server.wait()
    print(f"{options.starts} starts each, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, found in times.items():
        fastest, slowest = min(found), max(found)
        print(f"{name:16} median {statistics.median(found):.2f} s, fastest {fastest:.2f} s, slowest {slowest:.2f} s")
    if options.json:
        data: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "cores": os.cpu_count()}
        data |= {"python": sys.version.split()[0], "load": os.getloadavg()[0], "seconds": times}
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
