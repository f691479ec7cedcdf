"""The part of the exported train.py that reads the data."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from service.exports.templates.common import CONFIG, IGNORED, Sample, is_classifier, is_masked, sample_of
from service.exports.templates.masking import masked

# ---- data: files -> rows -> samples ----


ENDINGS = (".jsonl", ".json", ".csv", ".parquet")


def locate(source: str, revision: str | None, kind: str) -> Path:
    """A path that exists, relative to where you are, or the download of a hub id (`kind`: model or dataset)."""
    path = Path(source).expanduser()
    if path.exists():
        return path
    if path.suffix in ENDINGS or source.startswith((".", "/", "~")) or source.count("/") > 1:
        sys.exit(f"{kind}: {source} does not exist; --{'data' if kind == 'dataset' else 'model'} names another")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jsonl", "*.csv", "*.parquet"]
    if kind == "model":
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
    folder = Path(snapshot_download(source, revision=revision, repo_type=kind, allow_patterns=patterns))
    if kind == "model" and CONFIG["model"]["weights"] == "pretrained" and not any(folder.glob("*.safetensors")):
        folder = Path(snapshot_download(source, revision=revision, allow_patterns=[*patterns, "*.bin"]))
    return folder


def read_file(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a jsonl, csv or parquet file."""
    if path.suffix == ".csv":
        csv.field_size_limit(sys.maxsize)
        with path.open(newline="", encoding="utf-8") as stream:
            yield from csv.DictReader(stream)
    elif path.suffix == ".parquet":
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    else:
        with path.open(encoding="utf-8") as stream:
            yield from (json.loads(line) for line in stream if line.strip())


def files_of(source: Path, split: str) -> list[Path]:
    """The file itself, or those files of a folder that have `split` as a part of their path."""
    if source.is_file():
        return [source]
    every = sorted(path for path in source.rglob("*") if path.suffix in ENDINGS and path.is_file())
    part = re.compile(rf"(^|[-_./]){re.escape(split)}($|[-_./])" if split else "")
    return [path for path in every if part.search(str(path.relative_to(source)))]


def read_splits(source: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(train, validation) rows; a share of the training rows is held out when no validation rows are named."""
    splits = CONFIG["dataset"]["splits"]
    column, validation = splits["column"], splits["validation"]
    if column:
        rows = [row for path in files_of(source, "") for row in read_file(path)]
        train = [row for row in rows if str(row[column]) == splits["train"]]
        held = [row for row in rows if str(row[column]) == validation] if validation else []
    else:
        held_files = files_of(source, validation) if validation and source.is_dir() else []
        files = files_of(source, splits["train"])
        if not files and splits["train"] == "train":
            files = [path for path in files_of(source, "") if path not in held_files]
        train, held = ([row for path in some for row in read_file(path)] for some in (files, held_files))
    if not train or (validation and not held):
        sys.exit(f"the dataset {source} has no {'validation' if train else 'training'} rows")
    if not held:
        share = splits["validation_fraction"]
        out = [int((at + 1) * share) != int(at * share) for at in range(len(train))]
        held = [row for row, taken in zip(train, out, strict=True) if taken] or train[:1]
        train = [row for row, taken in zip(train, out, strict=True) if not taken]
    return train, held


def find_columns(row: dict[str, Any]) -> dict[str, str]:
    """The columns to read: those named in CONFIG, else the usual names."""
    usual = {
        "prompt": ("prompt", "instruction", "question", "input"),
        "completion": ("completion", "response", "answer", "output"),
        "messages": ("messages", "conversations"),
        "text": ("text", "sentence", "content", "review"),
        "label": ("label", "labels", "target"),
    }
    named = CONFIG["dataset"]["columns"]
    found = {
        kind: named.get(kind) or next((name for name in names if name in row), "") for kind, names in usual.items()
    }
    wanted: tuple[tuple[str, ...], ...] = (("text",),) if is_masked() else (("text", "label"),)
    if not is_classifier() and not is_masked():
        wanted = tuple((kind,) for kind in ("messages", "text") if named.get(kind)) or (
            ("prompt", "completion"),
            ("messages",),
            ("text",),
        )
    for kinds in wanted:
        if all(found[kind] in row for kind in kinds):
            return {kind: found[kind] for kind in kinds}
    sys.exit(f"the dataset needs the columns {' or '.join(map(' + '.join, wanted))}; it has {', '.join(row)}")


def encode(rows: list[dict[str, Any]], columns: dict[str, str], tokenizer: Any) -> list[Sample]:
    """Token ids and labels, cut at max_length."""
    if not rows:
        return []
    length = CONFIG["dataset"]["max_length"]
    values = {kind: [row[name] for row in rows] for kind, name in columns.items()}
    if is_classifier():
        ids = tokenizer(values["text"], truncation=True, max_length=length)["input_ids"]
        return [sample_of(one, [int(label)]) for one, label in zip(ids, values["label"], strict=True)]
    if is_masked():
        return [
            masked(ids, tokenizer) for ids in tokenizer(values["text"], truncation=True, max_length=length)["input_ids"]
        ]
    begin = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []

    def ids_of(texts: list[str]) -> list[list[int]]:
        return list(tokenizer([text or "" for text in texts], add_special_tokens=False)["input_ids"])

    if "messages" in columns:
        pairs = [chat(messages, tokenizer) for messages in values["messages"]]
    elif "text" in columns:
        pairs = [learnt_from(begin, text + end) for text in ids_of(values["text"])]
    else:
        prompts, completions = ids_of(values["prompt"]), ids_of(values["completion"])
        pairs = [learnt_from(begin + prompt, done + end) for prompt, done in zip(prompts, completions, strict=True)]
    return [labelled(ids, learnt, length, CONFIG["training"]["loss_on"]) for ids, learnt in pairs]


def learnt_from(asked: list[int], answer: list[int]) -> tuple[list[int], list[bool]]:
    """The tokens of both, of which the answer's are learnt."""
    return asked + answer, [False] * len(asked) + [True] * len(answer)


def labelled(ids: list[int], learnt: list[bool], length: int, loss_on: str) -> Sample:
    """A sample of at most `length` tokens; its first is never a target, whatever stands before it in a packed row."""
    labels = [one if answer or loss_on == "all" else IGNORED for one, answer in zip(ids, learnt, strict=True)]
    return sample_of(ids[:length], [IGNORED, *labels[1:length]])


def chat(messages: Any, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Tokens of a conversation by the model's template, and which of them are learnt: what the assistant says.

    A turn is what it adds to the turns before it. Some templates write a last turn otherwise than earlier ones (they
    leave out earlier thoughts): there only the last is learnt. So it is where nobody is called the assistant.
    """

    def ids_of(some: Any, **options: bool) -> list[int]:
        found = tokenizer.apply_chat_template(some, tokenize=True, return_dict=False, **options) if some else []
        return list(found)

    whole = ids_of(messages)
    learnt, last = [False] * len(whole), len(messages) - 1
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"] or [last]
    for at in turns:
        asked, done = ids_of(messages[:at], add_generation_prompt=True), ids_of(messages[: at + 1])
        if at == last or (whole[: len(done)] == done and done[: len(asked)] == asked):
            learnt[len(asked) : len(done)] = [True] * (len(done) - len(asked))
    return whole, learnt


def terms(sample: Sample) -> int:
    """How many terms of the loss a sample has: its learnt tokens, or 1 when it is classified."""
    return 1 if is_classifier() else sum(label != IGNORED for label in sample[1])


def load_data(source: str, revision: str | None, tokenizer: Any) -> tuple[list[Sample], list[Sample]]:
    """(train, validation) samples, without those that have nothing to learn from."""
    train_rows, validation_rows = read_splits(locate(source, revision, "dataset"))
    columns = find_columns(train_rows[0])
    train = [one for one in encode(train_rows, columns, tokenizer) if one[0] and terms(one) > 0]
    validation = [one for one in encode(validation_rows, columns, tokenizer) if one[0] and terms(one) > 0]
    if not train:
        sys.exit("the dataset has no row with anything to learn from within max_length")
    return train, validation or train[:1]
