"""What all commands say alike: text of others is printed as it is, never read as rich's markup."""

from __future__ import annotations

from rich.console import Console


def plain(console: Console, text: str) -> None:
    """A line as it is: brackets are no markup, numbers are not coloured, and only the terminal wraps it."""
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def say(sentence: str) -> None:
    """One sentence on stderr."""
    plain(Console(stderr=True), f"dynotune: {sentence}")
