"""What the benchmark asks of a child of its own, and what that child says."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from service.contract.base import Contract
from service.contract.child import ChildFailed, OutOfMemory, Workplace
from service.contract.configuration import Configuration
from service.contract.job import JobSpec


class Ask(Contract):
    """What a child of the benchmark's own is asked (finders/child.py)."""

    finder: str
    spec: JobSpec
    configuration: Configuration
    workplace: Workplace
    size: int | None = None


class Begun(Contract):
    """A finder begins with a batch size."""

    kind: Literal["begun"] = "begun"
    size: int


class Step(Contract):
    """A finder took a step."""

    kind: Literal["step"] = "step"


class Accepted(Contract):
    """A finder takes a batch size to fit."""

    kind: Literal["accepted"] = "accepted"
    size: int


class Answer(Contract):
    """The last message of a child that did what it was asked: figures by name."""

    kind: Literal["result"] = "result"
    figures: dict[str, int]


MESSAGES: TypeAdapter[Any] = TypeAdapter(
    Annotated[Begun | Step | Accepted | Answer | OutOfMemory | ChildFailed, Field(discriminator="kind")]
)
