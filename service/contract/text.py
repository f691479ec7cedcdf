"""Text that can be encoded and stored, whatever a file, a file's name or a library put into it; and sums of money."""

from __future__ import annotations


def storable(text: str) -> str:
    """The text with what databases and UTF-8 refuse as escapes: NUL, and half characters (lone surrogates)."""
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def money(amount: float) -> str:
    """A sum for people, without its currency: with two decimals, or two digits where it is less than 0.1."""
    return f"{amount:,.2f}" if amount >= 0.1 else f"{amount:.2g}"
