"""Of a large dataset a sample is tokenised, which stands for all of it: its lengths, its longest rows, its classes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.contract.measurement import DatasetFacts
from tests.child import tiny
from tests.factory import configuration
from training.recipe import Recipe
from training.source import ROWS_AT_ONCE, samples_of
from worker.child import data, evaluation_time, sampling
from worker.child.build import recipe_of
from worker.child.sampling import LONGEST, sampled

TEXTS = [{"text": "a" * (1 + at % 97)} for at in range(5000)]


def recipe(*columns: str, effective: int = 8) -> Recipe:
    """Some job's recipe, with these columns, each named as its kind."""
    made = recipe_of(tiny.job(Path("model"), Path("rows.jsonl")), configuration(effective=effective))
    return replace(made, columns={one: one for one in columns})


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if 200 rows were many."""
    monkeypatch.setattr(sampling, "MOST_ROWS", 200)
    monkeypatch.setattr(sampling, "LEAST_ROWS", 50)


def facts(folder: Path, tokenizer: Any, rows: list[dict[str, Any]], task: str = "causal-lm") -> DatasetFacts:
    """What is said of these rows as a job's data."""
    job = tiny.job(folder, tiny.write(folder / "rows.jsonl", rows), task=task)
    return data.load(job, recipe_of(job, configuration()), tokenizer, tiny.workplace(folder)).facts


def test_few_rows_are_all_taken() -> None:
    assert sampled(TEXTS, recipe("text")) is TEXTS and sampled([], recipe("text")) == []


@pytest.mark.usefixtures("few")
def test_a_sample_is_the_same_each_time_and_of_all_parts() -> None:
    found = sampled(TEXTS, recipe("text"))
    assert found == sampled(TEXTS, recipe("text")) and 200 <= len(found) <= 200 + LONGEST
    places = {id(row): at for at, row in enumerate(TEXTS)}
    drawn = [places[id(row)] for row in found]
    assert drawn == sorted(drawn), "in the order of the rows"
    assert {at // 25 for at in drawn} == set(range(200)), "one of each stretch of 25 rows"
    assert len({at % 25 for at in drawn}) > 15, "and not always the same one, as data may repeat a pattern"


@pytest.mark.usefixtures("few")
def test_long_rows_are_fewer_and_large_steps_have_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MOST_CHARACTERS", 100 * 49)  # 100 rows of the mean length
    assert 100 <= len(sampled(TEXTS, recipe("text"))) <= 100 + LONGEST
    assert 800 <= len(sampled(TEXTS, recipe("text", effective=100))) <= 800 + LONGEST


@pytest.mark.usefixtures("few")
def test_the_longest_row_and_each_class_are_in_it() -> None:
    rows = [{"text": "a few words", "label": at % 2} for at in range(5000)]
    rows[1234] |= {"text": "many words " * 50}
    rows[4321] |= {"label": 7}
    found = sampled(rows, recipe("text", "label"))
    assert rows[1234] in found and rows[4321] in found
    talks = [{"messages": [{"role": "user", "content": "a" * (1 + at % 9)}]} for at in range(5000)]
    talks[77]["messages"].append({"role": "assistant", "content": "b" * 100})
    assert talks[77] in sampled(talks, recipe("messages"))


@pytest.mark.usefixtures("few")
def test_facts_are_estimates_for_all_rows(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    rows = [{"prompt": "count", "completion": " one two" * rng.randrange(1, 6)} for _ in range(4000)]
    found = facts(tmp_path, tokenizer, rows)
    monkeypatch.undo()
    true = facts(tmp_path, tokenizer, rows)
    assert true.sampled_rows is None and not any("sample of" in note for note in true.notes)
    assert found.sampled_rows and found.sampled_rows < 280
    assert found.rows == true.rows and found.validation_rows == true.validation_rows
    assert found.tokens == pytest.approx(true.tokens, rel=0.1) and found.longest == true.longest
    assert sum(found.histogram.values()) == pytest.approx(found.rows, abs=2)
    assert any(f"Of {true.rows} training rows a sample of {found.sampled_rows}" in note for note in found.notes)


@pytest.mark.usefixtures("few")
def test_a_class_of_one_row_counts(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"text": "some words", "label": at % 2} for at in range(3000)]
    rows[2500] = {"text": "other words", "label": 2}
    job = tiny.job(tmp_path, tiny.write(tmp_path / "rows.jsonl", rows), task="sequence-classification")
    found = data.load(job, recipe_of(job, configuration()), tokenizer, tiny.workplace(tmp_path))
    assert found.facts.sampled_rows and max(label for _, (label,) in found.train) == 2


def test_an_evaluation_of_all_validation_rows_is_estimated(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tiny.bundle(tiny.job(llama, tiny.write(tmp_path / "rows.jsonl", tiny.pairs(200))))
    now = 0.0

    def guessed(_: Any, samples: list[Any], *__: Any) -> dict[str, float]:
        nonlocal now
        now += len(samples)
        return {}

    monkeypatch.setattr(evaluation_time, "guesses", guessed)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    once = evaluation_time.evaluation_seconds(bundle, 1)
    rows = 10 * bundle.data.facts.validation_rows
    bundle.data = replace(bundle.data, facts=bundle.data.facts.model_copy(update={"validation_rows": rows}))
    assert evaluation_time.evaluation_seconds(bundle, 1) == pytest.approx(10 * once)


def test_rows_are_tokenised_few_at_a_time(tokenizer: Any) -> None:
    """The same samples in the same order, and no call has more than ROWS_AT_ONCE texts."""
    rows = [{"prompt": f"question {at}", "completion": " answer"} for at in range(2 * ROWS_AT_ONCE + 1)]
    calls = []

    def counted(texts: Any, **options: Any) -> Any:
        calls.append(len(texts) if isinstance(texts, list) else 1)
        return tokenizer(texts, **options)

    class Counting:
        bos_token_id, eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        __call__ = staticmethod(counted)

    told = recipe("prompt", "completion")
    found = samples_of(rows, Counting(), told)
    assert max(calls) == ROWS_AT_ONCE and len(found) == len(rows)
    assert (
        found[-1] == samples_of(rows[-1:], tokenizer, told)[0] and found[0] == samples_of(rows[:1], tokenizer, told)[0]
    )
