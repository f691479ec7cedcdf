"""A child of a part: the function `child` of a file of this folder, in a process of its own that may use CUDA.

Forked from the server that trials are forked from, so that no part waits for the imports of torch and transformers.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from service.contract.base import Contract
from service.contract.child import ChildFailed
from service.contract.measurement import Outcome
from worker.child.isolation import isolate

ENTRY = "benchmarks.acceptance.child:main"


class Call(Contract):
    """The file whose function is called, its arguments, and whether what it times matters."""

    module: str
    arguments: tuple[Any, ...]
    dry: bool


class Answer(Contract):
    """What the function returned."""

    kind: Literal["result"] = "result"
    row: dict[str, Any]


MESSAGES: TypeAdapter[Any] = TypeAdapter(Annotated[Answer | ChildFailed, Field(discriminator="kind")])


def main(request: bytes, messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Make one call; the only message is its answer, or the error in a line."""
    isolate(lifeline, scratch)
    call = Call.model_validate_json(request)
    try:
        if call.dry:
            from benchmarks.acceptance import clock

            clock.LEAST_SECONDS = 0.0
        module = importlib.import_module(f"benchmarks.acceptance.{call.module}")
        said: Contract = Answer(row=module.child(*call.arguments))
    except Exception as error:  # noqa: BLE001 - the boundary of the process
        traceback.print_exc()
        said = ChildFailed(outcome=Outcome.crashed, reason=f"{type(error).__name__}: {error}")
    messages.send_bytes(said.model_dump_json().encode())
    messages.close()
    sys.stdout.flush()
