"""How much memory configurations need by the catalogue's factors, and a memory line scaled from one to another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from service.levers import LEVERS
from service.recipe import arithmetic
from worker.plan.grid import Floats, Grid, Rows, look_up
from worker.plan.view import View

BYTES = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


def memory_tables(view: View, grid: Grid) -> list[Floats]:
    """Tables of the grid: logarithms of activations' factors, state bytes a trained parameter, bytes a weight."""
    is_half = view.is_half()
    activations = {
        (name, choice.name): math.log(choice.memory.kept(is_half))
        for name, lever in LEVERS.items()
        for choice in lever.choices
    }
    states = {("optimizer", choice.name): choice.memory.state for choice in LEVERS["optimizer"].choices}
    if view.method == "qlora":
        weights = {("quantization", one.name): one.memory.weight or 2.0 for one in LEVERS["quantization"].choices}
    else:
        own = next((one.weights_dtype for one in view.history if one.weights_dtype), "float32")
        weights = {
            ("precision", one.name): _weight_bytes(arithmetic(view.method, one.options), own)
            for one in LEVERS["precision"].choices
        }
    return [grid.table(activations), grid.table(states), grid.table(weights)]


def coordinates(tables: list[Floats], rows: Rows) -> Floats:
    """Numbers that all grow with the memory that a row needs, of shape (rows, tables)."""
    return np.stack([look_up(table, rows).sum(axis=1) for table in tables], axis=1)


def saved(needs: Floats) -> Floats:
    """How much memory rows save: the negative logarithm of the activations' factors, and of the state's."""
    found: Floats = -needs[:, 0] - np.log(1 + needs[:, 1] + needs[:, 2])
    return found


def scaled(
    rest: Floats | float,
    slope: Floats | float,
    change: Floats,
    parameters: Floats | float,
    trained: Floats | float,
    micro: float = 1.0,
) -> tuple[Floats, Floats]:
    """(bytes at rest, bytes of `micro` samples) of rows, by the memory lines of others.

    `change` is by how much the rows' coordinates differ from those of the others; `parameters` and `trained` are how
    many parameters the model has and trains.
    """
    return rest + trained * change[:, 1] + parameters * change[:, 2], micro * slope * np.exp(change[:, 0])


def _weight_bytes(precision: Mapping[str, Any], own: str) -> float:
    """Bytes a weight takes under a precision, with the copy that autocast keeps of each while a step lasts."""
    held = BYTES.get(own if precision["weights"] == "auto" else precision["weights"], 4.0)
    copied = precision["autocast"] and precision["autocast_cache"] and held > BYTES["float16"]
    return held + (BYTES["float16"] if copied else 0.0)
