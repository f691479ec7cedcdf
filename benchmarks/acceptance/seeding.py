"""Part `seed-tables`: the published tables, by benchmarks/seed_tables.py, a table a step."""

from __future__ import annotations

import json
from functools import partial

from benchmarks.acceptance.models import data
from benchmarks.acceptance.place import Failed, Part, Place, Step
from benchmarks.published.tables import TABLES
from benchmarks.store import Row

# Seconds without which a table is not begun: a few rows. Each row is kept, so that the next call goes on with the rest.
SECONDS, TO_END = 60, 40


def table(place: Place, name: str) -> Row:
    """A table's printed lines and rows. Its own folder keeps the rows that are done when it is cut off."""
    file = place.home / f"{name}.json"
    home = place.home / "seed-tables"
    size = place.pick("full", "tiny")
    facts = place.home / "facts.json"
    facts.write_text(place.facts.model_dump_json())
    known = ["--facts", str(facts), "--data", str(data(place, "functions").parent)]
    options = ["--size", size, "--table", name, "--home", str(home), "--json", str(file)]
    limit = [] if place.dry else ["--seconds", str(max(1.0, place.left() - TO_END))]
    printed = place.python("-m", "benchmarks.seed_tables", *known, *options, *limit)
    rows = json.loads(file.read_text())["tables"][name]
    if left := [row["name"] for row in rows if row.get("reason", "").startswith("not begun")]:
        raise Failed(f"{len(left)} of {len(rows)} rows are left for the next call")
    return {"printed": printed.splitlines(), "table": rows}


def steps(place: Place) -> list[Step]:
    """One a table."""
    names = place.pick([*(one.name for one in TABLES), "generation"], ["states"])
    return [Step(f"seed-tables/{name}", SECONDS, partial(table, name=name)) for name in names]


def show(_: Place, rows: dict[str, Row]) -> list[str]:
    """As the benchmark printed them."""
    return [line for row in rows.values() for line in row.get("printed", ())]


PART = Part("seed-tables", steps, show)
