"""What benchmarks that may be called again share: results kept as they come, and progress beside the table."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Store:
    """Rows so far by key, in a file that is replaced whole."""

    def __init__(self, file: Path, fresh: bool = False) -> None:
        self._file = file
        self.rows: dict[str, Row] = json.loads(file.read_text()) if file.exists() and not fresh else {}

    def get(self, key: str) -> Row | None:
        """A row, or None when it has not been made."""
        return self.rows.get(key)

    def put(self, key: str, row: Row) -> Row:
        """Keep a row."""
        self.rows[key] = row
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(self.rows, indent=1))
        partial.replace(self._file)
        return row


def say(text: str) -> None:
    """Progress, beside the table."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)
