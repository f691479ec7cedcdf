"""The consoles of all commands. Text is printed as it is: never read as rich's markup, nor by the terminal as commands.

Names, columns of data and messages of libraries may hold escape sequences, which a terminal obeys: they could clear the
screen or show another text than is there. What could is shown as the replacement character.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# C0 and C1 control characters without tab and newline, and those that turn the direction of text (CVE-2021-42574).
COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """The text without characters that command a terminal."""
    return COMMANDS.sub("\ufffd", text)


def one_line(text: str) -> str:
    """The text as one harmless line: a name in a table must not begin a row of its own."""
    return harmless(" ".join(part.strip() for part in text.splitlines()))


class _Console(Console):
    """A console on which only rich itself commands the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What to print, as rich's segments."""
        for segment in super().render(renderable, options):
            clean = segment.control or not COMMANDS.search(segment.text)
            yield segment if clean else Segment(harmless(segment.text), segment.style)


def console(stderr: bool = False, quiet: bool = False) -> Console:
    """A console that prints brackets as brackets; what is bold or coloured is said by `style`, not in the text."""
    stream = sys.stderr if stderr else sys.stdout
    # A pipe or a file has no width, so one is given at which no table is cut.
    width = None if stream.isatty() else 140
    return _Console(stderr=stderr, quiet=quiet, width=width, markup=False, highlight=False, emoji=False)


def say(sentence: str) -> None:
    """Print one sentence on stderr."""
    console(stderr=True).print(f"dynotune: {one_line(sentence)}", soft_wrap=True)
