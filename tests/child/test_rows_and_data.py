"""Reading rows, turning them into samples, the token cache, and the work unit. A user's mistake gets one sentence."""

from __future__ import annotations

import csv
import itertools
import math
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from service.contract.job import DatasetSpec
from tests.child import tiny
from tests.conftest import ROOT
from tests.factory import configuration
from training.errors import TrainingError
from worker.child import data
from worker.child.build import recipe_of
from worker.child.rows import read_rows
from worker.runner.main import environment

ROWS: list[dict[str, Any]] = [
    {"prompt": f"question {at}", "completion": f'answer, "{at}"\nin two lines: ä €'} for at in range(23)
]


def write_as(ending: str, path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows in a format."""
    file = path.with_suffix(ending)
    file.parent.mkdir(parents=True, exist_ok=True)
    if ending in (".jsonl", ".json"):
        return tiny.write(file, rows)
    if ending == ".csv":
        with file.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return file
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=10)
    return file


def dataset(source: Path, max_length: int = 64, **changes: Any) -> DatasetSpec:
    """A dataset; any field can be given."""
    return DatasetSpec.model_validate({"source": str(source), "max_length": max_length} | changes)


def load(source: Path, cache: Path | None = None, task: str = "causal-lm", **changes: Any) -> data.Data:
    """The job's data, tokenised by the example's tokenizer."""
    spec = tiny.job(source.parent, source, task=task, dataset=dataset(source, **changes))
    return data.load(spec, recipe_of(spec, configuration()), tokenizer(), tiny.workplace(source.parent, cache=cache))


def read_splits(given: DatasetSpec, source: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The training and validation rows of a causal language model's job."""
    spec = tiny.job(source, source, dataset=given)
    return read_rows(spec, recipe_of(spec, configuration()), source)[:2]


def read_file(source: Path) -> list[dict[str, Any]]:
    """All rows of a file, by the training code."""
    train, held_out = read_splits(dataset(source, splits={"validation_fraction": 0.05}), source)
    return [*train, *held_out]


def tokenizer() -> Any:
    """The example's."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "examples" / "llama-13m")


def problem(error: pytest.ExceptionInfo[TrainingError]) -> str:
    """The sentence: one line, neither a traceback nor several sentences."""
    text = str(error.value)
    assert text and "\n" not in text and len(text) < 400 and not text.endswith(".")
    return text


# Reading


def test_reading_parquet_leaves_the_memory_that_a_cap_counts_to_the_trial(tmp_path: Path) -> None:
    """Arrow's usual allocator reserves a GiB of the data segment, which would be missing from the first trial only."""
    file = write_as(".parquet", tmp_path / "data", ROWS)
    code = """if True:
        import sys
        from pathlib import Path
        import psutil
        from training.reading import read_parquet
        before = psutil.Process().memory_info().data
        rows = list(read_parquet(Path(sys.argv[1])))
        print(len(rows), psutil.Process().memory_info().data - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", code, file], env=environment(), capture_output=True, text=True, check=True
    )
    rows, taken = map(int, done.stdout.split())
    assert rows == len(ROWS) and taken < 128 << 20


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, ending: str) -> None:
    rows = read_file(write_as(ending, tmp_path / "rows", ROWS))
    assert sorted(rows, key=ROWS.index) == ROWS


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_a_folder_with_splits(tmp_path: Path, ending: str) -> None:
    write_as(ending, tmp_path / "set" / "train-00000-of-00002", ROWS[:10])
    write_as(ending, tmp_path / "set" / "train-00001-of-00002", ROWS[10:15])
    write_as(ending, tmp_path / "set" / "validation-00000-of-00001", ROWS[15:18])
    write_as(ending, tmp_path / "set" / "test-00000-of-00001", ROWS[18:])
    source = tmp_path / "set"
    assert read_splits(dataset(source, splits={"validation": "validation"}), source) == (ROWS[:15], ROWS[15:18])
    train, held = read_splits(dataset(source, splits={"train": "test", "validation": "train"}), source)
    assert (train, held) == (ROWS[18:], ROWS[:15])


def test_a_folder_whose_files_name_no_split_is_all_training(tmp_path: Path) -> None:
    source = tmp_path / "set"
    write_as(".jsonl", source / "a", ROWS[:12])
    write_as(".jsonl", source / "b", ROWS[12:])
    train, held = read_splits(dataset(source), source)
    assert sorted(row["prompt"] for row in train + held) == sorted(row["prompt"] for row in ROWS)


def test_a_folder_called_train_does_not_make_every_file_a_training_file(tmp_path: Path) -> None:
    source = tmp_path / "train-sets" / "mine"
    write_as(".jsonl", source / "train", ROWS[:15])
    write_as(".jsonl", source / "validation", ROWS[15:])
    assert read_splits(dataset(source, splits={"validation": "validation"}), source) == (ROWS[:15], ROWS[15:])


def test_a_column_names_the_split(tmp_path: Path) -> None:
    rows = [row | {"part": "held" if at % 5 == 0 else "learn"} for at, row in enumerate(ROWS)]
    source = write_as(".jsonl", tmp_path / "rows", rows)
    splits = {"column": "part", "train": "learn", "validation": "held"}
    train, held = read_splits(dataset(source, splits=splits), source)
    assert {row["part"] for row in train} == {"learn"} and {row["part"] for row in held} == {"held"}
    assert len(train) + len(held) == len(rows)


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.25, 0.5])
def test_a_fraction_is_held_out(tmp_path: Path, fraction: float) -> None:
    rows = [{"text": str(at)} for at in range(400)]
    source = write_as(".jsonl", tmp_path / "rows", rows)
    train, held = read_splits(dataset(source, splits={"validation_fraction": fraction}), source)
    assert len(held) == pytest.approx(400 * fraction, abs=1)
    assert {row["text"] for row in train}.isdisjoint(row["text"] for row in held)
    assert len(train) + len(held) == 400
    assert read_splits(dataset(source, splits={"validation_fraction": fraction}), source) == (train, held)


def test_a_large_fraction_is_held_out_too(tmp_path: Path) -> None:
    rows = [{"text": str(at)} for at in range(400)]
    source = write_as(".jsonl", tmp_path / "rows", rows)
    _, held = read_splits(dataset(source, splits={"validation_fraction": 0.8}), source)
    assert len(held) == pytest.approx(320, abs=4)


# Mistakes


@pytest.mark.parametrize(
    ("line", "says"), [('{"prompt": "a", ', "not JSON"), ("[1, 2]", "must be a JSON object"), ('"text"', "object")]
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n\n' + line + "\n")
    with pytest.raises(TrainingError) as error:
        read_file(file)
    assert "rows.jsonl, line 3" in problem(error) and says in problem(error)


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_bytes_that_are_not_the_format_are_a_job_problem(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"rows{ending}"
    file.write_bytes(b"\xff\xfe\x00PK\x03\x04 not text \x80\x81" * 20)
    with pytest.raises(TrainingError) as error:
        read_file(file)
    assert file.name in problem(error)


def test_an_unknown_ending(tmp_path: Path) -> None:
    file = tmp_path / "rows.xlsx"
    file.write_text("")
    with pytest.raises(TrainingError) as error:
        read_file(file)
    assert ".jsonl" in problem(error)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file(tmp_path: Path, content: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    with pytest.raises(TrainingError) as error:
        load(file)
    assert "no training rows" in problem(error)


def test_an_empty_folder(tmp_path: Path) -> None:
    """Also one that is named as a file is; what helps with datasets of the hub is of no use here."""
    folder = tmp_path / "rows.jsonl"
    folder.mkdir()
    with pytest.raises(TrainingError) as error:
        load(folder)
    said = "has no .jsonl, .json, .csv, .parquet files; compressed files are not read"
    assert problem(error) == f"dataset.source: the folder {folder} {said}"


@pytest.mark.parametrize(
    ("splits", "says"),
    [
        ({"column": "part"}, "no column 'part'"),
        ({"column": "kind", "train": "nowhere"}, "no training rows"),
        ({"column": "kind", "train": "a", "validation": "nowhere"}, "no validation rows"),
        ({"validation": "validation"}, "no validation rows"),
    ],
)
def test_splits_that_are_not_there(tmp_path: Path, splits: dict[str, str], says: str) -> None:
    source = write_as(".jsonl", tmp_path / "rows", [row | {"kind": "a"} for row in ROWS])
    with pytest.raises(TrainingError) as error:
        read_splits(dataset(source, splits=splits), source)
    assert says in problem(error)


def test_a_split_column_that_a_later_row_lacks(tmp_path: Path) -> None:
    rows = [ROWS[0] | {"part": "train"}, ROWS[1]]
    source = write_as(".jsonl", tmp_path / "rows", rows)
    with pytest.raises(TrainingError) as error:
        read_splits(dataset(source, splits={"column": "part"}), source)
    assert "part" in problem(error)


@pytest.mark.parametrize(
    ("task", "columns", "says"),
    [
        ("causal-lm", {"prompt": "ask", "completion": "completion"}, "no column 'ask'"),
        ("causal-lm", {"text": "body"}, "no column 'body'"),
        ("sequence-classification", {}, "needs text and label"),
        ("sequence-classification", {"text": "prompt", "label": "stars"}, "no column 'stars'"),
    ],
)
def test_a_missing_column_lists_those_that_are_there(
    tmp_path: Path, task: str, columns: dict[str, str], says: str
) -> None:
    source = write_as(".jsonl", tmp_path / "rows", ROWS)
    with pytest.raises(TrainingError) as error:
        load(source, task=task, columns=columns)
    assert says in problem(error) and "prompt, completion" in problem(error)


def test_no_usual_column(tmp_path: Path) -> None:
    source = write_as(".jsonl", tmp_path / "rows", [{"a": "b"}] * 30)
    with pytest.raises(TrainingError) as error:
        load(source)
    assert "causal-lm needs" in problem(error)


def test_a_row_that_lacks_the_column(tmp_path: Path) -> None:
    source = write_as(".jsonl", tmp_path / "rows", [*ROWS, {"prompt": "alone"}])
    with pytest.raises(TrainingError) as error:
        load(source)
    assert "completion" in problem(error)


@pytest.mark.parametrize("value", [1.5, ["a"], False])
def test_a_text_that_is_none(tmp_path: Path, value: Any) -> None:
    source = write_as(".jsonl", tmp_path / "rows", [*ROWS, {"prompt": "a", "completion": value}])
    with pytest.raises(TrainingError) as error:
        load(source)
    assert type(value).__name__ in problem(error)


@pytest.mark.parametrize("label", ["positive", -1, 1.5, None, "nan"])
def test_a_label_that_is_no_class_number(tmp_path: Path, label: Any) -> None:
    source = write_as(".jsonl", tmp_path / "rows", [*tiny.classes(30), {"text": "a", "label": label}])
    with pytest.raises(TrainingError) as error:
        load(source, task="sequence-classification")
    assert repr(label) in problem(error)


def test_nothing_left_to_learn_from(tmp_path: Path) -> None:
    rows = [{"prompt": tiny.text(random.Random(at), 60), "completion": "x"} for at in range(30)]
    with pytest.raises(TrainingError) as error:
        load(write_as(".jsonl", tmp_path / "rows", rows), max_length=16)
    assert "max_length" in problem(error)


# Samples, the cache, the fingerprint


def test_samples_are_cut_and_their_prompts_not_learnt(functions: Path) -> None:
    found = load(functions, max_length=32)
    assert found.lengths == [len(ids) for ids, _ in found.train]
    assert max(found.lengths) == 32 and found.facts.at_max_length == found.lengths.count(32)
    for ids, labels in found.train:
        learnt = [at for at, label in enumerate(labels) if label != -100]
        assert learnt and learnt == list(range(learnt[0], len(ids))) and learnt[0] > 0
        assert [labels[at] for at in learnt] == [ids[at] for at in learnt]
    assert found.facts.tokens == sum(found.lengths) and found.facts.rows == len(found.train)
    assert sum(found.facts.histogram.values()) == found.facts.rows


@pytest.mark.parametrize("task", ["causal-lm", "sequence-classification"])
def test_the_cache_gives_back_what_was_tokenised(tmp_path: Path, functions: Path, reviews: Path, task: str) -> None:
    source = functions if task == "causal-lm" else reviews
    cache = tmp_path / "cache"
    fresh, again, other = load(source, cache, task), load(source, cache, task), load(source, None, task)
    assert [path.name for path in cache.iterdir()] == ["data.npz"]
    assert list(again.train) == list(fresh.train) == list(other.train) and again.drawn == fresh.drawn
    assert list(again.validation) == list(fresh.validation) and again.facts == fresh.facts == other.facts


def test_the_cache_is_read_and_not_the_data(tmp_path: Path) -> None:
    source = write_as(".jsonl", tmp_path / "rows", ROWS)
    fresh = load(source, tmp_path / "cache")
    source.unlink()
    assert list(load(source, tmp_path / "cache").train) == list(fresh.train)


def test_the_fingerprint_changes_with_the_data_and_only_then(tmp_path: Path) -> None:
    def fingerprint(rows: list[dict[str, Any]], ending: str = ".jsonl", max_length: int = 64) -> str:
        return load(write_as(ending, tmp_path / "rows", rows), max_length=max_length).facts.fingerprint

    first = fingerprint(ROWS)
    assert fingerprint(ROWS) == first == fingerprint(ROWS, ".parquet")
    changed = [*ROWS[:-1], ROWS[-1] | {"completion": "another"}]
    moved = [*ROWS[:-1], {"prompt": ROWS[-1]["prompt"] + " answer", "completion": ROWS[-1]["completion"][6:]}]
    others = {fingerprint(changed), fingerprint(ROWS[:-1]), fingerprint(ROWS, max_length=12), fingerprint(moved)}
    assert len(others | {first}) == 5


# The work unit


@pytest.mark.parametrize("seed", range(10))
def test_the_work_unit_is_fixed_distinct_and_of_the_right_size(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [int(rng.lognormvariate(5, 1)) for _ in range(rng.randint(64, 2000))]
    unit = data.work_unit(lengths, 64, seed, 16)
    assert len(unit) == len(set(unit)) == 64 and unit == data.work_unit(lengths, 64, seed, 16)
    if len(lengths) > 64:
        assert unit != data.work_unit(lengths, 64, seed + 1, 16)
    assert [lengths[one] for one in unit] != sorted(lengths[one] for one in unit), "its order is random"


@pytest.mark.parametrize("seed", range(10))
def test_the_work_unit_is_stratified(seed: int) -> None:
    """One from each slice of equal size: every quantile is met, which a random draw misses."""
    rng = random.Random(seed)
    lengths = [int(rng.lognormvariate(5, 1)) for _ in range(1280)]
    order = sorted(range(1280), key=lambda one: (lengths[one], one))
    rank = {sample: at for at, sample in enumerate(order)}
    assert sorted(rank[one] // 20 for one in data.work_unit(lengths, 64, seed, 16)) == list(range(64))
    units = [statistics.mean(lengths[one] for one in data.work_unit(lengths, 64, at, 16)) for at in range(30)]
    draws = [statistics.mean(rng.sample(lengths, 64)) for _ in range(30)]
    assert statistics.pstdev(units) < 0.6 * statistics.pstdev(draws)
    assert float(np.mean(units)) == pytest.approx(statistics.mean(lengths), rel=0.05)


def test_the_work_unit_is_padded_as_the_dataset_is() -> None:
    """What a small unit's micro batches compute, padding included, is what they do over the whole dataset."""
    rng = random.Random(7)
    lengths = [min(512, int(rng.lognormvariate(5, 1))) for _ in range(4_000)]
    shuffled = rng.sample(range(4_000), 4_000)

    def tokens_a_sample(samples: list[int], micro: int, power: int) -> float:
        batches = [samples[at : at + micro] for at in range(0, len(samples), micro)]
        return sum(len(one) * math.pow(max(lengths[at] for at in one), power) for one in batches) / len(samples)

    units = [data.work_unit(lengths, 48, seed, 24) for seed in range(30)]
    for micro in (1, 2, 4, 8, 12):
        for power, most in ((1, 0.025), (2, 0.04)):
            wanted = tokens_a_sample(shuffled, micro, power)
            found = [tokens_a_sample(unit, micro, power) / wanted for unit in units]
            assert statistics.mean(found) == pytest.approx(1.0, abs=0.02)
            assert statistics.pstdev(found) < most


def test_the_longest_of_a_few_samples_is_expected_as_counting_all_of_them_says() -> None:
    lengths = [1.0, 2.0, 2.0, 5.0, 9.0, 30.0]
    for count in range(1, 7):
        longest = [max(some) for some in itertools.combinations(lengths, count)]
        squares = [one**2 for one in longest]
        found = data._longest_expected(np.array(lengths), count)
        assert found == pytest.approx((statistics.mean(longest), statistics.mean(squares)))


def test_the_work_unit_of_a_small_dataset_is_all_of_it() -> None:
    assert sorted(data.work_unit([5, 3, 9], 64, 0, 8)) == [0, 1, 2]
