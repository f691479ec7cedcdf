"""What the commands have in common: options, the client, the screen, and how a command fails."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from service.client import Client

Url = Annotated[str, typer.Option("--url", envvar="DYNOTUNE_URL", help="The control plane.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LOCAL = "http://127.0.0.1:8000"


def emit(data: Any) -> None:
    """Print data, an answer of the API or a sequence of answers as JSON on stdout."""
    print(json.dumps(data, indent=2, default=lambda answer: json.loads(answer.model_dump_json())))


def connect(url: str) -> Client:
    """A client of the control plane, with the API key of DYNOTUNE_KEY if that is set."""
    from service.client import Client
    from service.ownkey import api_key

    return Client(url, key=api_key())


def screen() -> Console:
    """The console that results are printed on."""
    from service.cli.output import console

    return console()


def fail(sentence: str, code: int) -> NoReturn:
    """Print one sentence on stderr and exit."""
    from service.cli.output import say

    say(sentence)
    raise SystemExit(code)
