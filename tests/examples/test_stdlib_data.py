"""The example data and model folder: reproducible, balanced, free of leaks, and of the sizes promised."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODEL = EXAMPLES / "llama-13m"
NAMES = ("functions.jsonl", "packages.jsonl", "topics.txt")


def load_script(name: str) -> ModuleType:
    """Import an example by path, since examples/ is no package; FileNotFoundError if it is gone."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[str]]:
    """Run the script twice at once under different hash seeds; return the folders and what it printed."""
    folders = [tmp_path_factory.mktemp(f"seed{seed}") for seed in (1, 2)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(EXAMPLES / "stdlib_data.py"), "--out", str(folder)],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed, folder in enumerate(folders, start=1)
    ]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return folders, printed


def rows(runs: tuple[list[Path], list[str]], name: str) -> list[dict[str, Any]]:
    """Read one JSON-lines file of the first run."""
    return [json.loads(line) for line in (runs[0][0] / name).read_text("utf-8").split("\n") if line]


def words(text: str) -> str:
    """Return the text with its white space evened out, to compare by content."""
    return " ".join(text.split())


def test_same_bytes_under_another_hash_seed(runs: tuple[list[Path], list[str]]) -> None:
    (first, second), printed = runs
    assert sorted(path.name for path in first.iterdir()) == sorted(NAMES)
    for name in NAMES:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert printed[0] == printed[1]
    assert "functions: 5,000 rows" in printed[0]
    assert "packages/train: 1,600 rows" in printed[0]
    assert "packages/validation: 320 rows" in printed[0]


@pytest.mark.filterwarnings("ignore")  # the library has old escapes that compile() would warn of
def test_functions_are_distinct_and_whole(runs: tuple[list[Path], list[str]]) -> None:
    found = rows(runs, "functions.jsonl")
    assert len(found) == 5000
    assert all(set(row) == {"prompt", "completion"} for row in found)
    joined = [row["prompt"] + row["completion"] for row in found]
    assert len(set(joined)) == len(joined)
    for row in found:
        assert re.search(r"^(async )?def ", row["prompt"], re.MULTILINE), row["prompt"]
        assert len(row["completion"].strip()) >= 60
    for text in joined:  # signature, docstring and body meet without a gap: the two parts are one function
        compile(text, "<row>", "exec", dont_inherit=True)
    assert sum('"""' in row["prompt"] for row in found) > 2500


def test_function_lengths_in_tokens(runs: tuple[list[Path], list[str]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    # The rows are shuffled, so the first 2,000 stand for all.
    texts = [row["prompt"] + row["completion"] for row in rows(runs, "functions.jsonl")[:2000]]
    lengths = sorted(map(len, tokenizer(texts, verbose=False)["input_ids"]))
    quantile = {q: lengths[len(lengths) * q // 100] for q in (50, 90, 99)}
    assert 110 <= quantile[50] <= 220
    assert 350 <= quantile[90] <= 700
    assert 850 <= quantile[99] <= 1800


def test_classes_are_equal_in_each_split(runs: tuple[list[Path], list[str]]) -> None:
    found = rows(runs, "packages.jsonl")
    assert all(set(row) == {"text", "label", "package", "split"} for row in found)
    packages = load_script("stdlib_data").PACKAGES
    assert Counter((row["split"], row["label"], row["package"]) for row in found) == {
        (split, label, package): count
        for split, count in (("train", 200), ("validation", 40))
        for label, package in enumerate(packages)
    }
    # Shuffled, so that the first batches see every class.
    assert len({row["label"] for row in found[:64]}) == len(packages) == 8


def test_no_text_is_in_two_rows(runs: tuple[list[Path], list[str]]) -> None:
    texts = [words(row["text"]) for row in rows(runs, "packages.jsonl")]
    assert len(set(texts)) == len(texts) == 1920
    assert min(len(text.split()) for text in texts) >= 5


def test_topics_are_distinct_paragraphs(runs: tuple[list[Path], list[str]]) -> None:
    text = (runs[0][0] / "topics.txt").read_text("utf-8")
    blocks = text.removesuffix("\n").split("\n\n")
    assert len(blocks) > 1500
    assert len(set(blocks)) == len(blocks)
    assert all(block.strip() and block == block.strip("\n") for block in blocks)


def test_too_small_a_library_is_refused() -> None:
    script = load_script("stdlib_data")
    with pytest.raises(ValueError, match="0 functions of the 5000 needed"):
        script.function_rows([])
    with pytest.raises(ValueError, match="_pydecimal has 0 texts of the 240 needed"):
        script.package_rows([])


def test_tokenizer_round_trips_and_agrees_with_the_config() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    config = AutoConfig.from_pretrained(MODEL)
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == ("<pad>", "<s>", "</s>")
    assert tokenizer.pad_token_id == config.pad_token_id == 0
    assert tokenizer.bos_token_id == config.bos_token_id == 1
    assert tokenizer.eos_token_id == config.eos_token_id == 2
    assert len(tokenizer) == config.vocab_size == 8192
    assert tokenizer.model_max_length == config.max_position_embeddings == 2048
    text = "def f(x):\n\treturn x  # naïve 🦀\n"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == config.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_model_is_small_and_comes_without_weights() -> None:
    config = AutoConfig.from_pretrained(MODEL)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert 10e6 < sum(parameter.numel() for parameter in model.parameters()) < 15e6
    files = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert set(files) == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert sum(files.values()) < 1_000_000


def test_model_folder_is_what_its_script_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    script = load_script("make_llama_13m")
    assert json.loads((MODEL / "config.json").read_text("utf-8")) == script.CONFIG
    assert json.loads((MODEL / "tokenizer_config.json").read_text("utf-8")) == script.TOKENIZER_CONFIG
