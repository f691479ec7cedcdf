"""docs/adding.md does what it says: each of its files, in a folder of its own, works like those of the house."""

from __future__ import annotations

import gc
import importlib
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from service.cli.launchers import discover as discover_launchers
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import DatasetFacts
from service.contract.recommendation import Recommendation
from service.contract.task import PlanInput
from service.exports import EXPORTS
from service.exports import discover as discover_exports
from service.levers import LEVERS, unknown
from service.levers import discover as discover_levers
from service.recommend import recommend
from service.tasks import TASKS
from service.tasks import discover as discover_tasks
from tests.child import test_tasks, tiny
from tests.conftest import ROOT
from tests.exports import test_targets
from tests.factory import DATASET, configuration, history, measured, record
from tests.levers import test_catalogue, test_conformance
from training.batches import epoch_steps
from worker.child import soak, steps
from worker.child.arrange import plan_of
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
# peft asks for checkpointing by the name that transformers had for it before 5.23.
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing:FutureWarning")
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
        "service/cli/launchers",
    }
    assert set(PAGE) == kinds | {"worker/plan/proposers"} and len(BLOCKS) == len(PAGE)


def test_a_lever(add: Callable[[str], str], spec: Spec, facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    name = add("service/levers")
    assert name not in LEVERS
    lever = discover_levers()[name]
    monkeypatch.setitem(LEVERS, name, lever)
    test_conformance.test_a_lever_says_what_it_is(name)
    test_conformance.test_exclusions_say_why_and_each_one_tells()
    for choice in lever.names:
        test_conformance.test_unmet_needs_are_said_in_a_sentence(name, choice)
    test_catalogue.test_what_a_choice_says_to_trainer_are_arguments_that_it_has(name)
    test_targets.test_every_choice_has_a_word_for_every_exporter(name)
    assert unknown(name, "off") is None and lever.choice("off").missing(facts()) is None
    assert f"## {name}\n" in runpy.run_path(str(ROOT / "docs" / "make_levers.py"))["text"]()
    tried = _search(spec(search={"trials": 60, "minutes": 600}), facts())
    assert {made.levers[name] for made in tried} == set(lever.names), "its change is tried"


def test_a_levers_function(
    add: Callable[[str], str],
    facts: Facts,
    llama: Path,
    functions: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = add("service/levers")
    assert add("training/levers") == name
    monkeypatch.setitem(LEVERS, name, discover_levers()[name])
    job = tiny.job(llama, functions)
    try:
        tiny.bundle(job)
        assert gc.isenabled(), "the baseline leaves it alone"
        bundle = tiny.bundle(job, collector="off")
        assert not gc.isenabled(), "the trial's model was built with it"
        gc.enable()
        chosen = {name: "off", "precision": "fp32"}
        script = EXPORTS["train.py"].write(_recommended(job, chosen, bundle.data.facts, facts()))
        assert "gc.disable()" in script and "gc." not in EXPORTS["train.py"].write(
            _recommended(job, {"precision": "fp32"}, bundle.data.facts, facts())
        )
        _run(script, tmp_path)
        assert not gc.isenabled(), "train.py has it as well"
    finally:
        gc.enable()


def _recommended(job: JobSpec, levers: dict[str, str], dataset: DatasetFacts, facts: HardwareFacts) -> Recommendation:
    """The recommendation after one good trial with the levers."""
    trial = measured(configuration("lora", 8, 4, **levers), micro_batch_size=4, dataset=dataset)
    found = recommend("job1", job, facts, (record(trial),), {})
    assert found is not None
    return found


def _run(script: str, folder: Path) -> list[dict[str, float]]:
    """Two steps of an exported script, as its log has them, and its evaluation."""
    (folder / "train.py").write_text(script, encoding="utf-8")
    log = ["--log", str(folder / "log.jsonl"), "--output", str(folder / "output")]
    main = runpy.run_path(str(folder / "train.py"))["main"]
    main(["--max-steps", "2", "--device", "cpu", *log])
    return [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]


def test_a_task(
    add: Callable[[str], str],
    facts: Facts,
    llama: Path,
    reviews: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = add("service/tasks")
    assert add("training/tasks") == name not in TASKS
    monkeypatch.setitem(TASKS, name, discover_tasks()[name])
    test_tasks.test_a_task_declares_columns_that_it_knows_the_names_of(name)
    test_tasks.test_a_task_has_its_functions(name)
    job = tiny.job(llama, reviews, task=name)
    bundle = tiny.bundle(job)
    ids, labels = bundle.data.train[0]
    assert list(labels[1:]) == list(ids[1:]) and bundle.data.facts.columns == {"text": "text"}
    step = epoch_steps(bundle.data.lengths, 0, bundle.recipe)[0]
    losses = [float(steps.optimizer_step(bundle, *steps.prepare(bundle, step)[:2])[0]) for _ in range(3)]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 3, "it learns"
    evaluated = soak.evaluate(bundle, 4)
    assert evaluated.loss > 0 and evaluated.accuracy is not None and 0 <= evaluated.accuracy <= 1
    script = EXPORTS["train.py"].write(_recommended(job, {"precision": "fp32"}, bundle.data.facts, facts()))
    line, *_, evaluation = _run(script, tmp_path)
    assert line["loss"] == pytest.approx(losses[0], rel=1e-5), "train.py trains what the trial does"
    assert "evaluation_loss" in evaluation and "from training" not in script


def test_an_export(add: Callable[[str], str], spec: Spec, facts: Facts) -> None:
    before = discover_exports()
    name = add("service/exports")
    (file,) = discover_exports().keys() - before.keys()
    assert file.replace(".", "_") == name
    written = discover_exports()[file].write(_recommended(spec(), {"batching": "sorted"}, DATASET, facts()))
    assert "- batching: sorted\n" in written and len(written.splitlines()) == len(LEVERS)


def test_a_launcher(add: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    name = add("service/cli/launchers")
    command = typer.Typer()
    command.command(name)(discover_launchers()[name])
    command(["node1", "node 2; reboot", "--idle", "3"], standalone_mode=False)
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [line[:-1] for line in lines] == [["ssh", "-f", "--", host] for host in ("node1", "node 2; reboot")]
    assert all(line[-1].startswith("dynotune worker --devices all --exit-when-idle 3 --grace 45") for line in lines)


def _search(job: JobSpec, facts: HardwareFacts) -> list[Any]:
    """The configurations that the search tries, each slower than the one before."""
    records: list[Any] = []
    while trials := plan(PlanInput(spec=job, facts=facts, history=tuple(records), next_number=len(records) + 1)).trials:
        records += [record(measured(one.configuration, 5.0 + len(records)), one.origin) for one in trials]
    return [one.request.configuration for one in records]


def test_a_device(add: Callable[[str], str], spec: Spec, llama: Path, functions: Path) -> None:
    kind = add("worker/devices")
    assert kind in discover_devices()
    (found,) = (one for one in all_facts() if one.device == kind)
    assert HardwareFacts.model_validate_json(found.model_dump_json()) == found
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
    assert orders == sorted(orders) and type(proposers()[2]).__name__.lower() == name
    known = PlanInput(spec=job, facts=facts(), history=history(job, 6.0), next_number=3)
    assert plan(known) == plan(known), "it is pure"
    after = _search(job, facts())
    first = next(at for at, (ours, theirs) in enumerate(zip(after, before, strict=True)) if ours != theirs)
    proposed = after[first : first + 2]
    assert [made.levers for made in proposed] == [after[0].levers] * 2, "of the baseline, which nothing beat"
    assert [made.effective_batch_size for made in proposed] == [8, 16], "all that leave 50 steps an epoch"
