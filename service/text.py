"""Text that can be encoded and stored, whatever a file, its name or a library put into it; and words in sentences."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

NAMED = 20  # names that a sentence lists
SHORT = 400  # characters of an error's text in a sentence


def storable(text: str) -> str:
    """The text with what databases and UTF-8 refuse as escapes: NUL, and half characters (lone surrogates)."""
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def first_line(error: object) -> str:
    """The first line of an error's text: libraries' errors go on with statements, values and advice."""
    return str(error).strip().partition("\n")[0]


def told_in_short(error: object) -> str:
    """The first line of an error's text, or all of it where that only announces the rest; 400 characters at most."""
    text, line = str(error).strip(), first_line(error).rstrip()
    return textwrap.shorten(text if line.endswith(":") else line, SHORT, placeholder=" …").rstrip(".")


def money(amount: float) -> str:
    """A sum for people, without its currency: with two decimals, or two digits where it is less than 0.1."""
    return f"{amount:,.2f}" if amount >= 0.1 else f"{amount:.2g}"


def counted(count: int, one: str, many: str) -> str:
    """A number with the words that go with it: those for one, or those for many and none."""
    return f"{count:,} {one if count == 1 else many}"


def listed(given: Iterable[str]) -> str:
    """Names, such as a file's columns, in a sentence: the first of them, where there are many."""
    names = list(given)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
