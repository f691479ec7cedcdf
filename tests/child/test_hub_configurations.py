"""Of several configurations of a dataset one is read, no more than it is downloaded, and nothing beside the dataset."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from service.contract.job import DatasetSpec, Splits
from tests.child import tiny
from tests.child.test_sources import COMMIT, cache, dataset, model, put_in_cache, refused, root, workplace
from tests.conftest import ROOT
from tests.factory import configuration
from worker.child import data, sources
from worker.child.build import recipe_of

__all__ = ["cache", "root"]  # fixtures


CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/part-*}
  - {split: test, path: main/other.jsonl}
- config_name: socratic
  data_files: socratic/*.jsonl
- {config_name: below, data_dir: below}
---
# Words"""


def configured(cache: Path, card: str) -> None:
    """A dataset of the hub with these files."""
    names = ("main/part-0", "main/part-1", "main/other", "socratic/a", "below/train/b", "below/test", "stray")
    files = {f"{name}.jsonl": f'{{"text": "{name}"}}\n'.encode() * 2 for name in names}
    put_in_cache(cache, "dataset", "org/rows", COMMIT, files | {"README.md": card.encode()}, "main")


def texts(root: Path, **changes: Any) -> set[str]:
    """What a job trains on, and holds out, of that dataset."""
    spec = tiny.job(root, root, dataset={"source": "org/rows"} | changes)
    place, made = workplace(root), configuration()
    recipe = recipe_of(spec, made)
    tokenizer = tiny.tokenizer_of(ROOT / "examples" / "llama-13m", recipe)
    found = data.load(spec, recipe, tokenizer, place)
    return {tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in (*found.train, *found.validation)}


def test_of_several_configurations_the_one_that_is_named_is_read(root: Path, cache: Path) -> None:
    configured(cache, CARD)
    assert texts(root, config="main") == {"main/part-0", "main/part-1"}
    both = texts(root, config="main", splits={"validation": "test"})
    assert both == {"main/part-0", "main/part-1", "main/other"}
    assert texts(root, config="socratic") == {"socratic/a"}
    assert texts(root, config="below") == {"below/train/b"}
    sentence = refused(texts, root)
    assert "it has several configurations, name one of these: main, socratic, below" in sentence
    assert "'mian' is none of its configurations" in refused(texts, root, config="mian")
    assert "has no split 'train_sft'; it has train, test" in refused(
        texts, root, config="main", splits={"train": "train_sft"}
    )


def test_the_default_configuration_is_read_and_told(root: Path, cache: Path) -> None:
    configured(cache, CARD.replace("config_name: socratic", "config_name: socratic\n  default: true"))
    assert texts(root) == {"socratic/a"}
    _, found = sources.dataset_files(DatasetSpec(source="org/rows"), workplace(root))
    assert found.name == "default" and found.of_splits(Splits()) == (("socratic/*.jsonl",), ())


MAIN = {"main/part-0", "main/part-1", "main/other"}
# What a card says of its only configuration, and what is trained on.
CARDS = {
    "data_dir: ./main": MAIN,
    "data_dir: socratic/": {"socratic/a"},
    "data_dir: below": {"below/train/b"},
    "data_files: main/**": MAIN,
    "data_files: main/": MAIN,
    "data_files: ./main/part-**": {"main/part-0", "main/part-1"},
    "data_files: '**.jsonl'": {"stray"},
    "{data_dir: main, data_files: part-*}": {"main/part-0", "main/part-1"},
    "data_files: {train: [main/part-0.jsonl, stray.jsonl]}": {"main/part-0", "stray"},
}


@pytest.mark.parametrize("said", CARDS)
def test_files_of_a_card_are_written_in_many_ways(root: Path, cache: Path, said: str) -> None:
    entry = said if said.startswith("{") else f"{{{said}}}"
    configured(cache, f"---\nconfigs:\n- {entry}\n---\n")
    assert texts(root) == CARDS[said]


@pytest.mark.parametrize("path", ["../../../*.jsonl", "/etc/*.json", "hf://datasets/other/a.jsonl", "a/../../b.jsonl"])
@pytest.mark.parametrize("what", ["data_files", "data_dir", "config"])
def test_what_lies_outside_of_the_dataset_is_not_read(root: Path, cache: Path, path: str, what: str) -> None:
    """A card, or a job, would read any file of the worker."""
    configured(cache, "none" if what == "config" else f"---\nconfigs:\n- {{{what}: '{path}'}}\n---\n")
    sentence = refused(texts, root, **({"config": path} if what == "config" else {}))
    assert f"{path!r} of org/rows is not in its own folder" in sentence


@pytest.mark.parametrize("given", ["[null]", "5", "{train: null}", "[a.jsonl, {split: b}]", "''", "[]", "{}"])
def test_a_card_that_says_nothing_sensible_declares_nothing(root: Path, cache: Path, given: str) -> None:
    configured(cache, f"---\nconfigs:\n- {{config_name: null, data_files: {given}}}\n- 7\n---\n")
    assert "below/train/b" in texts(root), "as without a card, files' names say which train"


def test_a_file_has_no_configurations(root: Path) -> None:
    tiny.write(root / "a.jsonl", [{"text": "a"}])
    assert "is a file, which has no configurations" in refused(dataset, root / "a.jsonl", root, config="en")


def test_without_a_card_a_configuration_is_a_folder(root: Path, cache: Path) -> None:
    configured(cache, "no YAML")
    assert texts(root, config="below") == {"below/train/b"}
    assert "has no .jsonl" in refused(texts, root, config="other")


def test_the_commit_is_known_of_what_comes_from_the_hub(root: Path, cache: Path) -> None:
    configured(cache, CARD)
    assert sources.commit_of(dataset("org/rows", root, config="main")) == COMMIT
    assert sources.commit_of(root) is None


def test_only_what_is_read_is_downloaded(root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configured(cache, CARD)
    asked: list[Any] = []
    real = huggingface_hub.snapshot_download

    def download(*arguments: Any, **named: Any) -> str:
        asked.append((named["allow_patterns"], named["ignore_patterns"]))
        return str(real(*arguments, **named))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    dataset("org/rows", root, config="main")
    assert [patterns for patterns, _ in asked] == [["README.md"], ["main/part-*"]]
    put_in_cache(cache, "model", "org/name", COMMIT, {"config.json": b"{}", "model.safetensors": b""}, "main")
    model("org/name", root)
    model("org/name", root, weights="random")
    loaded, drawn = asked[-2:]
    assert "*.safetensors" in loaded[0] and "consolidated*" in loaded[1]
    assert not any("safetensors" in pattern or "bin" in pattern for pattern in drawn[0])


def test_what_does_not_fit_on_the_disk_is_not_begun(root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configured(cache, "no YAML")
    large = SimpleNamespace(rfilename="main/part-0.jsonl", size=5 << 40, lfs=None, blob_id="a" * 40)
    files = [large, SimpleNamespace(rfilename="x.bin", size=1 << 60, lfs=None, blob_id="b" * 40)]
    listed = SimpleNamespace(siblings=files)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, **__: listed)
    sentence = refused(sources._check_room, "org/rows", None, "dataset", ["*.jsonl"], None)
    assert "org/rows has 5497.6 GB to download" in sentence and "set HF_HOME to a larger disk" in sentence
    large.lfs = SimpleNamespace(sha256="c" * 64)
    (cache / "datasets--org--rows" / "blobs" / ("c" * 64)).touch()  # it is there already
    sources._check_room("org/rows", None, "dataset", ["*.jsonl"], None)
