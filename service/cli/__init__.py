"""`dynotune`: a client of the API; `serve` and `tune` also start the control plane and the worker."""

from __future__ import annotations

from service.cli.app import main

__all__ = ["main"]
