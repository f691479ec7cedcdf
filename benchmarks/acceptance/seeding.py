"""Part `seed-tables`: the published tables, by benchmarks/seed_tables.py, a table a step."""

from __future__ import annotations

import json
from functools import partial

from benchmarks.acceptance.models import data
from benchmarks.acceptance.place import Part, Place, Step
from benchmarks.published.tables import TABLES
from benchmarks.store import Row

SECONDS = {"warner": 420, "warner-mlm": 150, "lightning": 200, "predibase": 420, "memory": 150, "states": 90}


def table(place: Place, name: str) -> Row:
    """A table's printed lines and rows. Its own folder keeps the rows that are done when it is cut off."""
    file = place.home / f"{name}.json"
    home = place.home / "seed-tables"
    size = place.pick("full", "tiny")
    facts = place.home / "facts.json"
    facts.write_text(place.facts.model_dump_json())
    known = ["--facts", str(facts), "--data", str(data(place, "functions").parent)]
    options = ["--size", size, "--table", name, "--home", str(home), "--json", str(file)]
    printed = place.python("-m", "benchmarks.seed_tables", *known, *options)
    return {"printed": printed.splitlines(), "table": json.loads(file.read_text())["tables"][name]}


def steps(place: Place) -> list[Step]:
    """One a table."""
    names = place.pick([*(one.name for one in TABLES), "generation"], ["states"])
    return [Step(f"seed-tables/{name}", SECONDS.get(name, 90), partial(table, name=name)) for name in names]


def show(_: Place, rows: dict[str, Row]) -> list[str]:
    """As the benchmark printed them."""
    return [line for row in rows.values() for line in row.get("printed", ())]


PART = Part("seed-tables", steps, show)
