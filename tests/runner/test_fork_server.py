"""The fork server's imports: what libraries print is in the log file and not on the screen; no garbage is collected."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.conftest import ROOT


def test_the_fork_server_s_chatter_goes_to_the_log_and_its_children_collect_garbage(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    script = tmp_path / "owner.py"  # a process of its own: a process has one fork server for all its life
    script.write_text(
        textwrap.dedent(f"""
        from pathlib import Path
        from tests.runner.test_sandbox import asked
        from worker.runner.sandbox import Sandbox

        if __name__ == "__main__":
            sandbox = Sandbox(False, "tests.stubs:collecting", preload=("tests.chatter",), log=Path({str(log)!r}))
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
    assert (done.returncode, done.stdout, done.stderr) == (0, "result\nresult\n", "")
    assert log.read_text().count("Failed to load CPU gemm_4bit_forward") == 1 and "garbage is left" in log.read_text()
