"""How the worker's program is started in a process of its own."""

import sys

# With -P, or a file worker.py in the folder where this was called would be run in its place.
WORKER = (sys.executable, "-P", "-m", "worker")
