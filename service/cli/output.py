"""The consoles of all commands. Text is printed as it is and never read as rich's markup."""

from __future__ import annotations

import sys

from rich.console import Console


def console(stderr: bool = False, quiet: bool = False) -> Console:
    """A console that prints brackets as brackets; what is bold or coloured is said by `style`, not in the text."""
    stream = sys.stderr if stderr else sys.stdout
    # A pipe or a file has no width, so one is given at which no table is cut.
    width = None if stream.isatty() else 140
    return Console(stderr=stderr, quiet=quiet, width=width, markup=False, highlight=False, emoji=False)


def say(sentence: str) -> None:
    """Print one sentence on stderr."""
    console(stderr=True).print(f"dynotune: {sentence}", soft_wrap=True)
