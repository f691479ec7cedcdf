"""The base of all models of this package: frozen, and without unknown fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict


class Contract(BaseModel):
    """A frozen model that refuses unknown fields, so that a misspelt option is an error and is not ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True, ser_json_inf_nan="strings")


def without_former(*names: str) -> Callable[[Any], Any]:
    """A validator that leaves out fields which the model had once, so that what an older version stored can be read."""

    def read(value: Any) -> Any:
        return {name: one for name, one in value.items() if name not in names} if isinstance(value, dict) else value

    return read
