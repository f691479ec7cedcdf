"""The consoles of all commands. Text of others is printed as it is, never read as rich's markup."""

from __future__ import annotations

import sys

from rich.console import Console


def console(stderr: bool = False, quiet: bool = False) -> Console:
    """A console on which brackets are brackets: what is bold or yellow is said by `style`, not in the text."""
    stream = sys.stderr if stderr else sys.stdout
    # A pipe or a file has no width of its own: wide enough that no table is cut.
    width = None if stream.isatty() else 140
    return Console(stderr=stderr, quiet=quiet, width=width, markup=False, highlight=False, emoji=False)


def say(sentence: str) -> None:
    """One sentence on stderr."""
    console(stderr=True).print(f"dynotune: {sentence}", soft_wrap=True)
