"""Fails when a Python file has more than 400 lines: it should be split by what it does."""

import subprocess
import sys
from pathlib import Path

MOST = 400


def main() -> int:
    """Names every file that is too long; exit code 1 when there is one."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "*.py"], capture_output=True, text=True)
    files = [Path(line) for line in listed.stdout.splitlines()] or list(Path().glob("[a-z]*/**/*.py"))
    long = [(file, lines) for file in files if file.exists() and (lines := len(file.read_text().splitlines())) > MOST]
    for file, lines in long:
        sys.stderr.write(f"{file}: {lines} lines, at most {MOST}: split it by what it does\n")
    return 1 if long else 0


if __name__ == "__main__":
    sys.exit(main())
