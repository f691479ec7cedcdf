"""Of a large dataset a sample is tokenised, which stands for all of it: its lengths, its longest rows, its classes."""

from __future__ import annotations

import os
import random
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.contract.measurement import DatasetFacts
from tests.child import tiny
from tests.factory import configuration
from training import source
from training.batches import epoch_steps
from training.errors import TrainingError
from training.recipe import Recipe
from training.samples import Samples, sample_of
from training.source import ROWS_AT_ONCE
from worker.child import data, evaluation_time, sampling
from worker.child.build import recipe_of
from worker.child.data import samples_of
from worker.child.sampling import LONGEST_ROWS, Rows

TEXTS = [{"text": "a" * (1 + at % 97)} for at in range(5000)]


def sampled(rows: list[dict[str, Any]], told: Recipe) -> Rows:
    """The sample, of which no row is there twice."""
    found = sampling.sampled(rows, told)
    both = [id(row) for row in (*found.drawn, *found.others)]
    assert len(set(both)) == len(both)
    return found


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


def test_samples_are_a_sequence() -> None:
    """Of the arrays that were given, in their order; labels may be fewer than ids."""
    given = [sample_of(range(at), [at]) for at in range(1, 6)]
    made = Samples(given)
    assert list(made) == given and len(made) == 5 and made[-1] == given[-1] and made[1:4:2] == given[1:4:2]
    with pytest.raises(IndexError):
        made[5]
    assert not Samples()


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("effective", [1, 8])
def test_memory_of_rows_that_no_trial_reads_is_told_of_a_run(tmp_path: Path, tokenizer: Any, effective: int) -> None:
    """What a run's rows take, as Python counts it, is what is told for those that were left out, or a little less."""
    job = tiny.job(tmp_path, tiny.write(tmp_path / "rows.jsonl", TEXTS))
    told = recipe_of(job, configuration(effective=effective))
    found = data.load(job, told, tokenizer, tiny.workplace(tmp_path))
    told = recipe_of(job, configuration(effective=effective, micro=1), found.facts)
    source.load_data(str(tmp_path / "rows.jsonl"), tokenizer, told)  # what is loaded once is not counted
    tracemalloc.start()
    loaded = source.load_data(str(tmp_path / "rows.jsonl"), tokenizer, told)
    after, at_most = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    lengths = [len(ids) for ids, _ in loaded[0]]
    plan = epoch_steps(lengths, 0, told)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(plan) >= 4000 / effective
    unread = found.unread_bytes(effective) * found.facts.rows / (found.facts.rows - found.drawn[0])
    assert held <= unread <= 1.5 * held
    assert at_most - after < 4_000_000, "rows are dropped when they are tokenised"


@pytest.mark.usefixtures("few")
def test_a_trial_in_the_host_s_memory_holds_as_much_as_the_run_s_rows(tmp_path: Path, llama: Path) -> None:
    """Otherwise a run of a large dataset would run out of memory under the cap that its trial stayed below."""
    job = tiny.job(llama, tiny.write(tmp_path / "rows.jsonl", TEXTS))
    bundle = tiny.bundle(job, "lora")
    assert len(bundle.unread) == bundle.data.unread_bytes(bundle.recipe.effective_batch_size) > 1_000_000


@pytest.mark.usefixtures("few")
def test_rows_for_which_there_is_no_memory_are_the_job_s_mistake(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data.Data, "unread_bytes", lambda *_: 1 << 60)
    job = tiny.job(llama, tiny.write(tmp_path / "rows.jsonl", TEXTS))
    with pytest.raises(TrainingError, match="its 5,000 rows take about .* raise hardware.memory_gib"):
        tiny.bundle(job, "lora")


def test_few_rows_are_all_taken() -> None:
    assert sampled(TEXTS, recipe("text")) == (TEXTS, []) and sampled([], recipe("text")) == ([], [])


@pytest.mark.usefixtures("few")
def test_a_sample_is_the_same_each_time_and_of_all_parts() -> None:
    found = sampled(TEXTS, recipe("text"))
    assert found == sampled(TEXTS, recipe("text")) and len(found.drawn) == 200 and len(found.others) <= LONGEST_ROWS
    places = {id(row): at for at, row in enumerate(TEXTS)}
    drawn = [places[id(row)] for row in found.drawn]
    assert drawn == sorted(drawn), "in the order of the rows"
    assert {at // 25 for at in drawn} == set(range(200)), "one of each stretch of 25 rows"
    assert len({at % 25 for at in drawn}) > 15, "and not always the same one, as data may repeat a pattern"


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("dense", ["\u9f98" * 40, "0x7f,{};" * 13, "\U0001f9ff" * 30])
def test_a_row_of_many_tokens_and_few_bytes_is_there(dense: str) -> None:
    """One of rare characters had a token a byte, was shorter than a hundred others, and ended the run that read it."""
    rows: list[dict[str, Any]] = [{"text": "word " * 30} for _ in range(5000)]
    rows[4321] = {"text": dense}
    found = sampled(rows, recipe("text"))
    assert any(row is rows[4321] for row in (*found.drawn, *found.others))


@pytest.mark.usefixtures("few")
def test_long_rows_are_fewer_and_large_steps_have_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MOST_BYTES", 100 * 49)  # 100 rows of the mean length
    assert len(sampled(TEXTS, recipe("text")).drawn) == 100
    assert len(sampled(TEXTS, recipe("text", effective=100)).drawn) == 800


@pytest.mark.usefixtures("few")
def test_the_longest_row_and_each_class_are_in_it() -> None:
    rows = [{"text": "a few words", "label": at % 2} for at in range(5000)]
    rows[1234] |= {"text": "many words " * 50}
    rows[4321] |= {"label": 7}
    others = sampled(rows, recipe("text", "label")).others
    assert rows[1234] in others and rows[4321] in others
    talks = [{"messages": [{"role": "user", "content": "a" * (1 + at % 9)}]} for at in range(5000)]
    talks[77]["messages"].append({"role": "assistant", "content": "b" * 100})
    assert talks[77] in sampled(talks, recipe("messages")).others
    dense = [{"text": "a" * 90} for _ in range(5000)] + [{"text": "\u6f22" * 40}]
    assert dense[-1] in sampled(dense, recipe("text")).others, "fewer characters and more bytes, and so more tokens"


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
def test_the_longest_rows_do_not_count_as_typical(tmp_path: Path, tokenizer: Any) -> None:
    """Nor does half of a surrogate pair pass because its row is not drawn."""
    rows = [{"text": "some words"} for _ in range(5000)]
    rows[1001] = {"text": "many more words " * 20}
    job = tiny.job(tmp_path, tiny.write(tmp_path / "rows.jsonl", rows))
    found = data.load(job, recipe_of(job, configuration()), tokenizer, tiny.workplace(tmp_path))
    assert found.facts.longest == max(found.lengths) > 20 and max(found.typical) < 20
    assert found.facts.p99 < 20 and len(found.typical) < len(found.lengths)
    (tmp_path / "rows.jsonl").write_text('{"text": "some words"}\n' * 3000 + '{"text": "\\ud800"}\n')
    with pytest.raises(TrainingError, match="row 2851 has half of a surrogate pair"):  # of those that are not held out
        data.load(job, recipe_of(job, configuration()), tokenizer, tiny.workplace(tmp_path))


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


@pytest.mark.parametrize("before", ["false", None])
def test_all_cores_tokenise_and_one_from_then_on(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """A worker's processes are told to use one, and tokenizers look at it in each call."""
    name, seen = "TOKENIZERS_PARALLELISM", list[str | None]()
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)

    def looked(*given: Any) -> Any:
        seen.append(os.environ.get(name))
        return samples_of(*given)

    monkeypatch.setattr(data, "samples_of", looked)
    facts(tmp_path, tokenizer, [{"text": "some words"}] * 40)
    assert set(seen) == {"true"} and os.environ.get(name) == before


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
    found = list(samples_of(rows, Counting(), told))
    assert max(calls) == ROWS_AT_ONCE and len(found) == len(rows)
    assert [found[0], found[-1]] == list(samples_of([rows[0], rows[-1]], tokenizer, told))
