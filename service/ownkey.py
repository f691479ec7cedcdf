"""The API key that this process shows to a control plane (DYNOTUNE_KEY)."""

from __future__ import annotations

import os

from service.errors import Misconfigured


def api_key() -> str | None:
    """The key of DYNOTUNE_KEY, or None; Misconfigured, without telling the key, where it cannot be one.

    Blanks around it are left out, since a secret that is mounted as a file often ends with a line break.
    """
    key = os.environ.get("DYNOTUNE_KEY", "").strip()
    if not key:
        return None
    if not key.isascii() or not key.isprintable() or " " in key:
        raise Misconfigured("DYNOTUNE_KEY holds characters that no API key has; copy the key anew.")
    return key
