"""`python -m worker`."""

import signal
import sys
from importlib.util import find_spec

NEEDED = ("torch", "transformers", "optuna", "numpy")

if __name__ == "__main__":
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"dynotune worker: {', '.join(missing)} not installed; they come with dynotune's extra `worker`")
    # Until the worker has handlers of its own: a user may change their mind while it starts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(130))
    from worker.runner.main import app
    from worker.runner.stay import spelled_out

    app(spelled_out(sys.argv[1:]), prog_name="dynotune worker")
