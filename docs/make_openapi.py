"""Writes docs/openapi.json, the description of the REST API: python docs/make_openapi.py"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from service.api import create_app
from service.settings import Settings

FILE = Path(__file__).parent / "openapi.json"


def text() -> str:
    """The description, as the running service gives it at /openapi.json."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        app = create_app(Settings(home=home, database_url=f"sqlite:///{home / 'none.db'}"))
        return json.dumps(app.openapi(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
