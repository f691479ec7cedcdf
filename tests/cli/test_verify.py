"""`dynotune compare`, and the job by which `dynotune verify` measures a recommendation again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from service.cli import verify
from service.cli.app import app
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Probe
from service.contract.recommendation import Recommendation
from service.contract.states import Origin
from service.contract.task import PlanInput
from service.errors import Misconfigured
from service.levers.batching import GROUP_STEPS
from service.recommend import recommend
from tests.factory import failed, history, measured, record
from worker.plan import plan
from worker.plan.proposers.baseline import baseline

Make = Callable[..., Recommendation]


@pytest.fixture
def found(spec: Callable[..., JobSpec], facts: Callable[..., HardwareFacts]) -> Make:
    """A recommendation of a configuration that takes so many seconds, on a machine with these facts."""

    def make(seconds: float = 5.0, **changes: Any) -> Recommendation:
        made = recommend("a-job", spec(), facts(**changes), history(spec(), seconds), {})
        assert made is not None
        return made

    return make


def test_a_slower_answer_does_not_hold_and_says_what_differs(found: Make) -> None:
    old = found()
    assert verify.compare(old, found(5.2)).holds, "4% is within what machines do"
    new = verify.compare(old, found(8.0, versions={"python": "3.11", "torch": "2.14.0"}))
    assert not new.holds and "below the older interval" in new.reasons[0]
    assert new.environment == {"torch": ("2.13.0", "2.14.0")} and new.levers == {}
    assert any(line.startswith("torch: 2.13.0 then, 2.14.0 now") for line in new.lines())


def test_answers_to_different_jobs_are_not_compared(found: Make) -> None:
    """LoRA of one task and full finetuning of another were told to hold."""
    other = found()
    other = other.model_copy(update={"spec": other.spec | {"task": "masked-lm"}})
    with pytest.raises(Misconfigured, match=r"different jobs \(task causal-lm then, masked-lm now\)"):
        verify.compare(found(), other)


def test_the_exit_code_tells(found: Make, tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(found().model_dump_json())
    new.write_text(found(8.0).model_dump_json())
    runner = CliRunner()
    assert runner.invoke(app, ["compare", str(old), str(old)]).exit_code == 0
    worse = runner.invoke(app, ["compare", str(old), str(new), "--json"])
    assert worse.exit_code == 1 and json.loads(worse.stdout)["holds"] is False


@pytest.mark.parametrize("text", ["{}", "no json", "[]"])
def test_what_is_no_recommendation_is_told_in_a_sentence(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(Misconfigured, match=r"other\.json is no recommendation\.json"):
        verify.read(file)
    with pytest.raises(Misconfigured, match="No such file"):
        verify.read(tmp_path / "missing.json")


def test_the_job_holds_everything_fixed(found: Make) -> None:
    job = verify.job_of(found(), 2.0)
    spec = JobSpec.model_validate(job)
    assert spec.search.fixed == found().configuration.levers and spec.search.trials == 2 and spec.search.minutes == 2.0
    assert spec.method == ("lora",) and spec.search.max_micro_batch_size is None


@pytest.mark.parametrize(("then", "now"), [("quick", "quick"), ("standard", "standard"), ("strict", "standard")])
def test_as_many_steps_are_grouped_as_were(found: Make, then: str, now: str) -> None:
    """How thorough the verification was says how many steps `grouped` sorts at a time, and so how much is padding."""
    old = found()
    search = old.spec["search"] | {"verify": then}
    job = JobSpec.model_validate(verify.job_of(old.model_copy(update={"spec": old.spec | {"search": search}}), 2.0))
    assert job.search.verify == now and GROUP_STEPS[then] == GROUP_STEPS[now]


@pytest.mark.parametrize("given", [32, None])
def test_the_baseline_is_as_it_was_and_the_recommendation_at_its_own_sizes(
    found: Make, facts: Callable[..., HardwareFacts], given: int | None
) -> None:
    """A most for its micro batch, and its effective batch, had been the baseline's as well."""
    old = found()
    first = JobSpec.model_validate(old.spec)
    first = first.model_copy(update={"training": first.training.model_copy(update={"effective_batch_size": given})})
    old = old.model_copy(
        update={
            "spec": first.model_dump(mode="json"),
            "configuration": old.configuration.model_copy(update={"micro_batch_size": 2, "learning_rate": 3e-4}),
        }
    )
    job, usual = JobSpec.model_validate(verify.job_of(old, 2.0)), baseline(first, "lora", {})[0]
    (request,) = plan(PlanInput(spec=job, facts=facts(), history=(), next_number=1)).trials
    assert request.configuration == usual and usual.effective_batch_size == (given or 8)
    ran = record(measured(usual), Origin.baseline)
    (request,) = plan(PlanInput(spec=job, facts=facts(), history=(ran,), next_number=2)).trials
    again = request.configuration
    assert again.levers == old.configuration.levers
    assert (again.effective_batch_size, again.micro_batch_size, again.learning_rate) == (32, 2, 3e-4)
    both = (ran, record(measured(again, 5.0), number=2))
    assert plan(PlanInput(spec=job, facts=facts(), history=both, next_number=3)).verify is not None


def test_a_baseline_that_takes_two_trials_leaves_one_for_the_recommendation(
    found: Make, facts: Callable[..., HardwareFacts]
) -> None:
    old = found()
    job, usual = (
        JobSpec.model_validate(verify.job_of(old, 2.0)),
        baseline(JobSpec.model_validate(old.spec), "lora", {})[0],
    )
    probes = (Probe(micro_batch_size=8, peak_bytes=None),)
    ran = (
        record(failed(usual, probes=probes), Origin.baseline),
        record(measured(usual.at_micro_batch(None)), Origin.baseline, 2),
    )
    (request,) = plan(PlanInput(spec=job, facts=facts(), history=ran, next_number=3)).trials
    assert request.configuration.levers == old.configuration.levers and request.configuration.micro_batch_size == 8


def test_nothing_is_tried_beside_a_recommendation_that_is_the_baseline(
    found: Make, facts: Callable[..., HardwareFacts]
) -> None:
    old = found()
    usual = baseline(JobSpec.model_validate(old.spec), "lora", {})[0]
    sizes = {"levers": usual.levers, "micro_batch_size": usual.micro_batch_size}
    old = old.model_copy(update={"configuration": old.configuration.model_copy(update=sizes)})
    job = JobSpec.model_validate(verify.job_of(old, 2.0))
    ran = record(measured(usual), Origin.baseline)
    decision = plan(PlanInput(spec=job, facts=facts(), history=(ran,), next_number=2))
    assert not decision.trials and decision.finish and decision.error is None
