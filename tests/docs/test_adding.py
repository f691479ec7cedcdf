"""docs/adding.md does what it says: each of its files, in a folder of its own, works like those of the house."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.task import PlanInput
from service.levers import LEVERS, unknown
from service.levers import discover as discover_levers
from tests.child import tiny
from tests.conftest import ROOT
from tests.factory import history, measured, record
from tests.levers import test_catalogue, test_conformance
from worker.child.curve import plan_of
from worker.child.timing import Unit
from worker.devices import discover as discover_devices
from worker.devices import open_device
from worker.devices.facts import all_facts
from worker.plan import plan
from worker.plan.proposers import proposers

BLOCKS = re.findall(
    r"```python\n# (\S+)/(\w+)\.py\n(.*?)```", (ROOT / "docs" / "adding.md").read_text("utf-8"), re.DOTALL
)
PAGE: dict[str, tuple[str, str]] = {folder: (name, text) for folder, name, text in BLOCKS}
MOST_LINES = 20
Facts = Callable[..., HardwareFacts]
Spec = Callable[..., JobSpec]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Adds the page's file of a folder, from a temporary one, and gives its name; all is as before after the test."""
    added: list[tuple[Any, str]] = []

    def make(folder: str) -> str:
        name, text = PAGE[folder]
        place = tmp_path / folder
        place.mkdir(parents=True)
        (place / f"{name}.py").write_text(text, encoding="utf-8")
        package = importlib.import_module(folder.replace("/", "."))
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(place)])
        importlib.invalidate_caches()
        added.append((package, name))
        return name

    yield make
    for package, name in added:
        sys.modules.pop(f"{package.__name__}.{name}", None)
        vars(package).pop(name, None)


@pytest.mark.parametrize("folder", PAGE)
def test_a_file_of_the_page_is_short_and_new(folder: str) -> None:
    name, text = PAGE[folder]
    assert len(text.splitlines()) <= MOST_LINES
    assert not (ROOT / folder / f"{name}.py").exists()


def test_every_kind_is_on_the_page() -> None:
    kinds = {
        "service/levers",
        "training/levers",
        "service/tasks",
        "training/tasks",
        "worker/devices",
        "service/exports",
    }
    assert set(PAGE) == kinds | {"worker/plan/proposers"} and len(BLOCKS) == len(PAGE)


def test_a_lever(add: Callable[[str], str], spec: Spec, facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    name = add("service/levers")
    assert name not in LEVERS
    lever = discover_levers()[name]
    monkeypatch.setitem(LEVERS, name, lever)
    assert [*LEVERS] == [*discover_levers()], "its order is the last"
    test_conformance.test_a_lever_says_what_it_is(name)
    test_conformance.test_exclusions_name_what_exists()
    for choice in lever.names:
        test_conformance.test_unmet_needs_are_said_in_a_sentence(name, choice)
    test_catalogue.test_declarations_name_choices_that_exist(name)
    test_catalogue.test_no_two_levers_or_changes_have_the_same_place()
    assert unknown(name, "off") is None and lever.choice("off").missing(facts()) is None
    assert f"## {name}\n" in runpy.run_path(str(ROOT / "docs" / "make_levers.py"))["text"]()
    tried = _search(spec(search={"trials": 20, "minutes": 600}), facts())
    assert {made.levers[name] for made in tried} == set(lever.names), "its change is tried"


def _search(job: JobSpec, facts: HardwareFacts) -> list[Any]:
    """The configurations that the search tries, each slower than the one before."""
    records: list[Any] = []
    while trials := plan(PlanInput(spec=job, facts=facts, history=tuple(records), next_number=len(records) + 1)).trials:
        records += [record(measured(one.configuration, 5.0 + len(records)), one.origin) for one in trials]
    return [one.request.configuration for one in records]


def test_a_device(add: Callable[[str], str], spec: Spec, llama: Path, functions: Path) -> None:
    kind = add("worker/devices")
    assert [*discover_devices()][-1] == kind, "its order is the last"
    found = all_facts()[-1]
    assert found.device == kind and HardwareFacts.model_validate_json(found.model_dump_json()) == found
    job = spec(hardware={"device": kind})
    assert plan(PlanInput(spec=job, facts=found, history=(), next_number=1)).trials[0].origin == "baseline"
    bundle = tiny.bundle(tiny.job(llama, functions), on=open_device(kind))
    unit = Unit(bundle, 4, plan_of(bundle, list(range(8)), 4))
    assert unit.run() and unit.timing().seconds > 0
    assert unit.timing().clean_share is None, "it tells nothing of others"


def test_a_proposer(add: Callable[[str], str], spec: Spec, facts: Facts) -> None:
    job = spec(training={"learning_rate": 1e-4}, search={"trials": 60, "minutes": 600})
    before = _search(job, facts())
    name = add("worker/plan/proposers")
    orders = [proposer.order for proposer in proposers()]
    assert orders == sorted(orders) and type(proposers()[3]).__name__.lower() == name
    known = PlanInput(spec=job, facts=facts(), history=history(job, 6.0), next_number=3)
    assert plan(known) == plan(known), "it is pure"
    after = _search(job, facts())
    first = next(at for at, (ours, theirs) in enumerate(zip(after, before, strict=True)) if ours != theirs)
    proposed = after[first : first + 2]
    assert [made.levers for made in proposed] == [after[0].levers] * 2, "of the baseline, which nothing beat"
    assert [made.effective_batch_size for made in proposed] == [8, 16], "all that leave 50 steps an epoch"
