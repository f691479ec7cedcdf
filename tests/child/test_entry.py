"""What a child sets up for its request, before it begins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from service.contract.child import MESSAGE, ChildFailed, OutOfMemory, RunBlock, RunTrial
from service.contract.measurement import Outcome
from service.contract.states import Origin
from service.contract.task import TrialRequest
from tests.child import tiny
from tests.factory import configuration
from training.errors import TrainingError
from worker.child import again, entry, measure
from worker.child.build import build


def test_what_no_database_keeps_is_told_as_escapes() -> None:
    """A column's name or a library's message may hold half a character, or a NUL."""
    told = ChildFailed(outcome=Outcome.invalid, reason="there is no column 'a\ud83d\0'")
    assert MESSAGE.validate_json(told.model_dump_json()) == told
    assert told.reason == "there is no column 'a\\ud83d\\x00'"


def test_a_crash_is_told_in_one_line_that_ends_with_a_word() -> None:
    told = entry._failure(RuntimeError("It broke:\n  in the " + "middle " * 100), [])
    assert isinstance(told, ChildFailed) and told.outcome is Outcome.crashed
    assert told.reason.startswith("RuntimeError: It broke: in the middle") and told.reason.endswith("middle …")


def raised_for(reason: BaseException, error: type[Exception]) -> BaseException:
    """An error as it comes from code that caught another one, and says what failed."""
    try:
        try:
            raise reason
        except type(reason):
            raise error("model.source: its config.json is not one that loads")  # noqa: B904 - as some libraries do
    except error as told:
        return told


@pytest.mark.parametrize("error", [TrainingError, OSError, TimeoutError])
@pytest.mark.parametrize("reason", [MemoryError(), OSError(12, "Cannot allocate memory")])
def test_a_shortage_of_memory_is_no_mistake_of_the_user(reason: BaseException, error: type[Exception]) -> None:
    """Under a small cap memory ran out while config.json was read, and the whole job failed for that file."""
    told = entry._failure(raised_for(raised_for(reason, ValueError), error), [])
    assert isinstance(told, OutOfMemory) and ("MemoryError" in told.reason or "allocate" in told.reason)


def test_what_was_raised_for_another_error_stays_a_mistake_of_the_user() -> None:
    told = entry._failure(raised_for(KeyError("model_type"), TrainingError), [])
    assert isinstance(told, ChildFailed) and told.whole_job and "config.json" in told.reason


class Asked(Exception):
    """The request was begun."""


@pytest.mark.parametrize(
    ("kind", "compiled", "shared"),
    [(RunTrial, "per-layer", False), (RunTrial, "off", True), (RunBlock, "per-layer", True)],
)
def test_only_what_times_no_compiling_shares_what_is_compiled(
    llama: Path,
    functions: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    compiled: str,
    shared: bool,
) -> None:
    def begun(*_: Any) -> None:
        raise Asked

    monkeypatch.setattr(measure, "run_trial", begun)
    monkeypatch.setattr(again, "serve", begun)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "own")
    place = tiny.workplace(llama, cache=tmp_path)
    trial = TrialRequest(configuration=configuration(compile=compiled), origin=Origin.recipe, number=1)
    request = kind.model_construct(
        workplace=place, spec=tiny.job(llama, functions), trial=trial, known=(), only_probe=False
    )
    monkeypatch.setattr("worker.devices.cpu.Cpu.limit", lambda *_: None)
    with pytest.raises(Asked):
        entry._run(request, lambda _: None, lambda: None, [])  # type: ignore[arg-type, return-value]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == (str(tmp_path / "compile") if shared else "own")


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_what_the_first_trial_does_for_all_is_told_apart(llama: Path, functions: Path, tmp_path: Path) -> None:
    """What is expected of later processes leaves it out: it took a quarter of some searches."""
    spec, made = tiny.job(llama, functions), configuration("lora", 8, precision="fp32")
    place = tiny.workplace(llama, functions.parent, cache=tmp_path / "cache")
    first, second = (build(spec, made, tiny.device(), place, 0) for _ in range(2))
    assert first.prepare_seconds > 0 and first.data_seconds == 0.0
    assert second.prepare_seconds == 0.0 and second.data_seconds > 0
