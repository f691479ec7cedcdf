"""`python -m worker`."""

import sys
from importlib.util import find_spec

NEEDED = ("torch", "transformers", "optuna", "numpy")

if __name__ == "__main__":
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"dynotune worker: {', '.join(missing)} not installed; pip install 'dynotune[worker]'")
    from worker.main import main

    main()
