"""The base of all models of this package: frozen, and without unknown fields."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Contract(BaseModel):
    """A frozen model that refuses unknown fields, so that a misspelt option is an error and is not ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True, ser_json_inf_nan="strings")
