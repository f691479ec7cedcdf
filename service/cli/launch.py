"""`dynotune launch`: a command for each launcher of service/cli/launchers."""

from __future__ import annotations

import typer

from service.cli.launchers import discover

launch = typer.Typer(
    help="Start workers on a cluster: print the file that starts them, or hand it in with --submit.",
    no_args_is_help=True,
)
for _name, _command in discover().items():
    launch.command(_name)(_command)
