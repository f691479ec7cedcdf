"""Sets up the fork server, which imports this first: its output goes to a file, it outlives SIGTERM, it keeps garbage.

multiprocessing starts that server, and importing a module in it is the only way to redirect its output, so that what
libraries print while they are imported is not on the screen. Children inherit the redirected output until they open
their own file (worker/child/isolation.py).

The server ignores SIGTERM, which a cluster's scheduler sends to every process of a worker: it ends with the worker, and
has to tell until then how its children ended. It collects no garbage: what is imported stays, and looking for garbage
in it would slow down the imports of torch and transformers. Its children do collect garbage (worker/runner/sandbox.py).
"""

from __future__ import annotations

import gc
import os
import signal

gc.disable()
signal.signal(signal.SIGTERM, signal.SIG_IGN)

if path := os.environ.get("DYNOTUNE_WORKER_LOG"):
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
