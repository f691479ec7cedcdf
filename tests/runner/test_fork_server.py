"""The fork server's imports: what libraries print is in the log file and not on the screen; no garbage is collected.

Where an import would take CUDA from the children, they get on without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.conftest import ROOT


def run_twice(folder: Path, own_memory: bool, entry: str, preload: tuple[str, ...]) -> tuple[str, str]:
    """What two children of one sandbox ended as, and the fork server's log."""
    log = folder / "worker.log"
    script = folder / "owner.py"  # a process of its own: a process has one fork server for all its life
    script.write_text(
        textwrap.dedent(f"""
        from pathlib import Path
        from tests.runner.test_sandbox import asked
        from worker.runner.sandbox import Sandbox

        if __name__ == "__main__":
            sandbox = Sandbox({own_memory}, "tests.stubs:{entry}", preload={preload}, log=Path({str(log)!r}))
            for _ in range(2):
                print(sandbox.run(asked(), 60, lambda _: None, lambda: False).kind, flush=True)
            sandbox.close()
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, log.read_text()


def test_the_fork_server_s_chatter_goes_to_the_log_and_its_children_collect_garbage(tmp_path: Path) -> None:
    ended, log = run_twice(tmp_path, False, "collecting", ("tests.chatter",))
    assert ended == "result\nresult\n"
    assert log.count("Failed to load CPU gemm_4bit_forward") == 1 and "garbage is left" in log


def test_what_would_take_cuda_from_the_children_is_not_imported_ahead(tmp_path: Path) -> None:
    ended, log = run_twice(tmp_path, True, "needing_cuda", ("torch", "tests.spoiling"))
    assert ended == "result\nresult\n"
    assert log.count("after importing torch, tests.spoiling, a child cannot use CUDA (Cannot re-initialize CUDA") == 1


def test_an_import_that_ends_the_fork_server_is_not_imported_ahead(tmp_path: Path) -> None:
    ended, log = run_twice(tmp_path, True, "needing_cuda", ("torch", "tests.dying"))
    assert ended == "result\nresult\n" and "built for another torch" in log
