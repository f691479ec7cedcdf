"""Text that can be encoded and stored, whatever a file, a file's name or a library put into it."""

from __future__ import annotations


def storable(text: str) -> str:
    """The text with what databases and UTF-8 refuse as escapes: NUL, and half characters (lone surrogates)."""
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()
