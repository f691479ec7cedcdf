"""Surfaces from tables of real measurements: every valid configuration of a small job, measured as a trial.

A table is a folder's JSON file that `benchmarks/collect_table.py` writes: the job, the worker's facts, and a
measurement of every configuration of the search space, which is the full factorial of the few levers that the job
leaves open, and of the baseline. The ratios of their seconds to the baseline's come from turns that they took with
it, in groups that change from round to round. Their scores are taken for the truth; what a policy is told has 1% of
noise on top.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.surfaces.base import Surface
from benchmarks.surfaces.recipes import recipes
from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec, Method
from service.contract.measurement import DatasetFacts, Measurement, Outcome
from service.contract.objective import score
from service.contract.task import PlanInput
from service.levers import LEVERS
from service.space import Space, applicable, space
from service.stored import completed
from worker.plan.proposers.baseline import baseline
from worker.plan.space import effective_choices, make
from worker.plan.view import View

TABLES = Path(__file__).parent / "tables"
NEAR = 1.02  # times the best: what counts as having found it, for `switches`
# Standard deviations of a ratio's logarithm: of noise, of what a group has in common, of what a pair of choices does
# beside what they do alone, and of what one choice does, the micro batch counting as one. Under the first three the
# committed tables are likeliest (benchmarks/table_spreads.py); the last is too large to draw anything to 0.
NOISE = 0.022
SPREADS = {"group": 0.015, "pair": 0.008, "choice": 1.0}
Effect = tuple[str, Any]  # a key of SPREADS, and the choice, the pair of choices, or the number of the group
LEFT_OUT = {"dataset", "losses", "grad_norms", "curve", "adapter_excludes"}  # of what is kept of a measurement


def valid(spec: JobSpec, facts: HardwareFacts, rows: int) -> list[Configuration]:
    """The baseline, and every valid configuration of a job's search space."""
    method = spec.method[0]
    choices = applicable(space(spec, facts), method, spec.task)
    found = [baseline(spec, method, {})[0], *every(spec, method, choices, effective_choices(spec, rows))]
    return list({one.key: one for one in found}.values())


def every(spec: JobSpec, method: Method, choices: Space, effectives: tuple[int, ...]) -> Iterator[Configuration]:
    """All valid configurations, in a fixed order."""
    for combination in product(*choices.values()):
        for effective in effectives:
            made = make(spec, method, dict(zip(choices, combination, strict=True)), effective)
            if made is not None:
                yield made


class Table:
    """A table's file: the job, the facts, and measurements as they come. It is written anew after each."""

    def __init__(self, file: Path, spec: JobSpec | None = None, facts: HardwareFacts | None = None) -> None:
        self.file = file
        if file.exists():
            kept: dict[str, Any] = json.loads(file.read_text())
        else:
            assert spec is not None and facts is not None, f"there is no table {file}"
            kept = {"spec": spec.model_dump(mode="json"), "facts": facts.model_dump(mode="json"), "dataset": None}
            kept |= {"measurements": [], "ratios": []}
        self._kept = kept
        self.spec, self.facts = JobSpec.model_validate(kept["spec"]), HardwareFacts.model_validate(kept["facts"])
        if kept["measurements"]:  # levers that came since stay as the trials had them
            then = kept["measurements"][0]["configuration"]["levers"]
            since = {name: lever.baseline for name, lever in LEVERS.items() if name not in then}
            search = self.spec.search.model_copy(update={"fixed": self.spec.search.fixed | since})
            self.spec = self.spec.model_copy(update={"search": search})

    @property
    def dataset(self) -> DatasetFacts | None:
        """The data's facts, the same in every measurement; None before the first."""
        return DatasetFacts.model_validate(self._kept["dataset"]) if self._kept["dataset"] else None

    def measurements(self) -> dict[str, Measurement]:
        """By configurations' keys, with seconds by the ratios to the baseline, where there are any."""
        found = {one.configuration.key: one for one in self._every()}
        ratios = told(self.ratios(), {key: choices_of(one) for key, one in found.items()})
        reference = self.baseline().timing
        return {
            key: _scaled(one, ratios[key] * reference.seconds) if reference and key in ratios else one
            for key, one in found.items()
        }

    def ratios(self) -> list[dict[str, float]]:
        """Of each group, configuration's key -> its seconds over the baseline's as they took turns."""
        return [ratios for _, ratios in self._rounds()]

    def _rounds(self) -> list[tuple[int, dict[str, float]]]:
        """(round, ratios by the keys that configurations have now) of each group."""
        kept = [row["configuration"] for row in self._kept["measurements"]]
        read = Configuration.model_validate
        now = {read(one).key: read(completed(one)).key for one in kept}
        return [
            (row["round"], {now.get(key, key): ratio for key, ratio in row["ratios"].items()})
            for row in self._kept.get("ratios", ())
        ]

    def baseline(self) -> Measurement:
        """The baseline's measurement."""
        key = baseline(self.spec, self.spec.method[0], {})[0].key
        return next(one for one in self._every() if one.configuration.key == key)

    def groups(self, rounds: int, size: int) -> Iterator[tuple[int, list[Measurement]]]:
        """(round, configurations that take turns with the baseline together) of what is left of so many rounds.

        Each round has its own order, so that a configuration meets others each time.
        """
        good = {one.configuration.key: one for one in self._every() if one.timing}
        good.pop(self.baseline().configuration.key)
        for number in range(rounds):
            done = {key for its_round, ratios in self._rounds() if its_round == number for key in ratios}
            left = [key for key in random.Random(number).sample(sorted(good), len(good)) if key not in done]
            for at in range(0, len(left), size):
                yield number, [good[key] for key in left[at : at + size]]

    def add_ratios(self, number: int, ratios: dict[str, float]) -> None:
        """Keep a group's ratios of a round."""
        self._kept.setdefault("ratios", []).append({"round": number, "ratios": ratios})
        self._write()

    def _every(self) -> list[Measurement]:
        """All measurements; a lever that came since they were made is at its baseline in each."""
        dataset = self._kept["dataset"]
        return [
            Measurement.model_validate({**completed(one), "dataset": dataset}) for one in self._kept["measurements"]
        ]

    def add(self, measurement: Measurement) -> None:
        """Keep a measurement beside those that there are of its configuration."""
        if measurement.dataset is not None:
            self._kept["dataset"] = measurement.dataset.model_dump(mode="json")
        row = measurement.model_dump(mode="json", exclude=LEFT_OUT, exclude_defaults=True)
        self._kept["measurements"].append(row)
        self._write()

    def _write(self) -> None:
        partial = self.file.with_suffix(".partial")
        head = {name: value for name, value in self._kept.items() if name != "measurements"}
        rows = ",\n".join(json.dumps(one) for one in self._kept["measurements"])
        partial.write_text(f'{json.dumps(head)[:-1]}, "measurements": [\n{rows}\n]}}\n')
        partial.replace(self.file)

    def missing(self) -> list[Configuration]:
        """What has no measurement yet, the baseline first, as it tells the count of rows."""
        seen = {one.configuration.key for one in self._every()}
        rows = self.dataset.rows if self.dataset else 0
        return [one for one in valid(self.spec, self.facts, rows) if one.key not in seen]


def choices_of(one: Measurement) -> list[str]:
    """The texts of a configuration's choices, its effective batch, and the micro batch that its trial found."""
    made = one.configuration
    sizes = (f"effective={made.effective_batch_size}", f"micro={one.micro_batch_size}")
    return [*(f"{name}={choice}" for name, choice in made.levers.items()), *sizes]


def told(groups: list[dict[str, float]], choices: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Configuration's key -> its seconds over the baseline's, by the ratios that were seen in groups.

    `choices` are the texts of a configuration's choices. The logarithm of a ratio is the sum of what its choices do,
    what pairs of them do, what its group has in common (whose ratios are all to one process of the baseline), and
    noise: a mixed model, whose best linear unbiased predictions these are (Henderson 1975). Without it, the best of a
    hundred ratios would be the luckiest.
    """
    design, values, names = mixed_model(groups, choices)
    drawn = np.diag([NOISE / SPREADS[kind] for kind, _ in names])  # how much each is drawn to 0
    padded = np.concatenate([values, np.zeros(len(names))])
    fitted = dict(zip(names, np.linalg.lstsq(np.vstack([design, drawn]), padded, rcond=None)[0], strict=True))
    keys = {key for group in groups for key in group}
    return {key: math.exp(sum(fitted[one] for one in terms(choices[key]))) for key in keys}


def terms(choices: Sequence[str]) -> list[Effect]:
    """The effects that a configuration with these choices has."""
    return [*(("choice", one) for one in choices), *(("pair", pair) for pair in combinations(choices, 2))]


def mixed_model(
    groups: list[dict[str, float]], choices: Mapping[str, Sequence[str]]
) -> tuple[np.ndarray, np.ndarray, list[Effect]]:
    """(which effects each ratio has, of shape (ratios, effects), the logarithms of the ratios, the effects)."""
    seen = [(key, number, ratio) for number, group in enumerate(groups) for key, ratio in group.items()]
    effects: list[list[Effect]] = [[*terms(choices[key]), ("group", number)] for key, number, _ in seen]
    names = list(dict.fromkeys(one for mine in effects for one in mine))
    at = {one: place for place, one in enumerate(names)}
    design = np.zeros((len(seen), len(names)))
    for row, mine in enumerate(effects):
        design[row, [at[one] for one in mine]] = 1.0
    return design, np.log([ratio for _, _, ratio in seen]), names


def _scaled(one: Measurement, seconds: float) -> Measurement:
    """The measurement with a work unit that takes so many seconds."""
    if one.timing is None:
        return one
    return one.model_copy(update={"timing": one.timing.scaled(seconds / one.timing.seconds)})


class Recorded(Surface):
    """The surface of a complete table."""

    kind = "recorded"

    def __init__(self, file: Path) -> None:
        super().__init__()
        table = Table(file)
        assert table.dataset is not None and not table.missing(), f"{file} is not complete: collect the rest of it"
        self.name, self.spec, self.facts, self._rows = file.stem, table.spec, table.facts, table.dataset.rows
        self._table = table.measurements()
        self._fingerprint = hashlib.sha256(file.read_bytes()).hexdigest()[:16]

    @property
    def rows(self) -> int:
        """The rows of the training split."""
        return self._rows

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits over the table's file."""
        return self._fingerprint

    @cached_property
    def best(self) -> float:  # type: ignore[override]
        """The least score in the table."""
        return min(map(self._score, self._table.values()))

    @cached_property
    def switches(self) -> int:  # type: ignore[override]
        """The fewest levers in which a configuration within 2% of the best differs from the baseline or a recipe."""
        method = self.spec.method[0]
        view = View(PlanInput(spec=self.spec, facts=self.facts), method)
        effectives = effective_choices(self.spec, self._rows)
        starts = [baseline(self.spec, method, {})[0], *recipes(view, effectives[min(1, len(effectives) - 1)])]
        near = [one.configuration for one in self._table.values() if self._score(one) <= self.best * NEAR]
        return min(
            sum(one.levers[name] != start.levers[name] for name in one.levers) for one in near for start in starts
        )

    def _score(self, measurement: Measurement) -> float:
        return score(self.spec, measurement) if measurement.outcome is Outcome.ok else math.inf

    def _found(self, configuration: Configuration) -> Measurement:
        """Its measurement. A table has each configuration at the micro batch that its trial found to be the fastest."""
        searched = configuration.at_micro_batch(None)
        return self._table.get(configuration.key) or self._table[searched.key]

    def _true_score(self, configuration: Configuration) -> float:
        return self._score(self._found(configuration))

    @cached_property
    def _trial_seconds(self) -> float:
        """What the trials of all configurations took together."""
        return sum(sum(one.time_spent.values()) for one in self._table.values())

    def trial_share(self, configuration: Configuration) -> float:
        """The share that a configuration's trial had of all trials' time."""
        return sum(self._found(configuration).time_spent.values()) / self._trial_seconds

    def _measure(self, configuration: Configuration, seed: int) -> Measurement:
        # Told as of the configuration that was asked for, or a search would ask for it again and again.
        found = self._found(configuration).model_copy(update={"configuration": configuration})
        if found.timing is None:
            return found
        return _scaled(found, found.timing.seconds * self.noise(configuration, seed))


def tables() -> list[str]:
    """The names of the tables that are complete enough to be listed: those that were committed."""
    return sorted(file.stem for file in TABLES.glob("*.json"))
