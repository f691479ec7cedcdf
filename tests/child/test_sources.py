"""Models and data come from below the allowed folders or the hub's cache, hold no code and no pickles."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from service.contract.child import Workplace
from service.contract.job import DatasetSpec, ModelSpec, Splits
from service.text import told_in_short
from tests.child import tiny
from tests.conftest import ROOT
from tests.factory import configuration
from training.errors import TrainingError
from worker.child import build, rows, sources

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "f" * 40


def put_in_cache(cache: Path, kind: str, name: str, commit: str, files: dict[str, bytes], ref: str | None) -> Path:
    """Files laid out as the hub's cache has them: blobs, and a snapshot of links to them."""
    repository = cache / f"{kind}s--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for at, (path, content) in enumerate(files.items()):
        blob = repository / "blobs" / f"{commit[:8]}{at:032x}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = snapshot / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    if ref:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache; the hub is out of reach."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An allowed folder."""
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def workplace(root: Path, **more: Any) -> Workplace:
    """A workplace that allows the folder, and the cache beside it."""
    return Workplace(device="cpu", data_roots=(root,), hub_cache=root.parent / "hub", **more)


def read_splits(spec: DatasetSpec, source: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The training and validation rows of a causal language model's job."""
    job = tiny.job(source, source, dataset=spec)
    return rows.read_rows(job, build.recipe_of(job, configuration()), source)[:2]


def model(source: str | Path, root: Path, pickle: bool = False, code: bool = False, **changes: Any) -> Path:
    """The folder of a model."""
    spec = ModelSpec.model_validate({"source": str(source)} | changes)
    return sources.model_folder(spec, workplace(root, allow_pickle=pickle, allow_remote_code=code))


def dataset(source: str | Path, root: Path, **changes: Any) -> Path:
    """The path of a dataset."""
    return sources.dataset_files(DatasetSpec.model_validate({"source": str(source)} | changes), workplace(root))[0]


def refused(call: Any, *arguments: Any, **named: Any) -> str:
    """The one sentence of a TrainingError."""
    with pytest.raises(TrainingError) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def folder_with(root: Path, *names: str, config: str = '{"model_type": "llama"}') -> Path:
    """A model folder below the root with empty weight files of these names."""
    folder = root / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def test_relative_paths_start_at_the_first_root(root: Path) -> None:
    folder = folder_with(root, "model.safetensors")
    assert model("model", root) == model("./model", root) == model(folder, root) == folder


@pytest.mark.parametrize("source", ["/etc", "../elsewhere", "model/../../elsewhere", "./missing.jsonl/../../elsewhere"])
def test_paths_outside_the_roots_are_refused(root: Path, source: str) -> None:
    (root.parent / "elsewhere").mkdir()
    folder_with(root)
    for call, field in ((model, "model.source"), (dataset, "dataset.source")):
        sentence = refused(call, source, root)
        assert sentence.startswith(field) and "outside the allowed folders" in sentence and str(root) in sentence


def test_a_link_that_leads_out_of_the_root_is_refused(root: Path) -> None:
    outside = tiny.write(root.parent / "outside" / "secret.jsonl", [{"text": "secret"}])
    (root / "file.jsonl").symlink_to(outside)
    (root / "folder").symlink_to(outside.parent)
    for source in ("file.jsonl", "folder", "folder/secret.jsonl"):
        assert "outside the allowed folders" in refused(dataset, source, root)


def test_a_link_inside_a_dataset_folder_is_not_followed_out_of_the_root(root: Path) -> None:
    outside = tiny.write(root.parent / "outside" / "secret.jsonl", [{"text": "secret"}] * 4)
    inside = root / "data"
    tiny.write(inside / "train.jsonl", [{"text": "open"}] * 4)
    (inside / "train-more.jsonl").symlink_to(outside)
    spec = DatasetSpec(source=str(inside))
    try:
        train, held = read_splits(spec, dataset(inside, root))
    except TrainingError:
        return
    assert {row["text"] for row in train + held} == {"open"}


def test_a_link_within_the_root_is_fine(root: Path) -> None:
    file = tiny.write(root / "real" / "rows.jsonl", [{"text": "x"}])
    (root / "alias.jsonl").symlink_to(file)
    assert dataset("alias.jsonl", root) == root / "alias.jsonl"


@pytest.mark.parametrize("source", ["./data", "/nowhere/data", "a/b/c", "rows.jsonl", "org/rows.parquet"])
def test_what_looks_like_a_path_is_not_asked_of_the_hub(root: Path, source: str) -> None:
    assert refused(dataset, source, root) == f"dataset.source: {source} does not exist on the worker"


def test_a_model_of_the_hub_is_found_in_its_cache(root: Path, cache: Path) -> None:
    files = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"weights"}
    newest = put_in_cache(cache, "model", "org/name", COMMIT, files, "main")
    older = put_in_cache(cache, "model", "org/name", OLDER, files | {"config.json": b"{}"}, "v1")
    assert model("org/name", root) == newest
    assert model("org/name", root, revision="main") == newest
    assert model("org/name", root, revision="v1") == model("org/name", root, revision=OLDER) == older
    assert (newest / "model.safetensors").read_bytes() == b"weights"


def test_a_dataset_of_the_hub_is_found_in_its_cache_and_read_through_its_links(root: Path, cache: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in tiny.pairs(10)).encode()
    snapshot = put_in_cache(cache, "dataset", "org/rows", COMMIT, {"data/train-00000.jsonl": lines}, "main")
    found = dataset("org/rows", root)
    assert found == snapshot
    train, held = read_splits(DatasetSpec(source="org/rows", splits=Splits(validation_fraction=0.2)), found)
    assert len(train) == 8 and len(held) == 2


def test_what_is_not_in_the_cache_is_said_with_its_revision(root: Path, cache: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": b""}
    put_in_cache(cache, "model", "org/name", COMMIT, files, "main")
    for source, revision in (("org/other", None), ("org/name", "v9"), ("org/name", OLDER)):
        sentence = refused(model, source, root, revision=revision)
        assert source in sentence and (revision or "") in sentence and "cache" in sentence
    assert "dataset.source" in refused(dataset, "org/name", root), "a model's cache holds no dataset"


def test_the_cache_is_found_through_the_environment(root: Path) -> None:
    """As a trial's child has it: nothing set but the environment."""
    files = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b""}
    snapshot = put_in_cache(root.parent / "hub", "model", "org/name", COMMIT, files, "main")
    script = (
        "from pathlib import Path; from worker.child import sources; from service.contract.job import ModelSpec\n"
        "from service.contract.child import Workplace\n"
        "from service.settings import Settings\n"
        "place = Workplace(device='cpu', data_roots=(), hub_cache=Settings.from_environment().hub_cache)\n"
        "print(sources.model_folder(ModelSpec(source='org/name'), place))"
    )
    environment = os.environ | {"HF_HUB_CACHE": str(root.parent / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == str(snapshot), done.stderr


@pytest.mark.parametrize("source", ["not a hub id", "a--b", "-x", "org/na me"])
def test_what_is_neither_path_nor_hub_id_is_said(root: Path, cache: Path, source: str) -> None:
    assert "neither a path that exists nor a hub id" in refused(model, source, root)


def test_a_folder_without_a_configuration_is_no_model(root: Path) -> None:
    (root / "model").mkdir()
    assert "config.json" in refused(model, "model", root)


@pytest.mark.parametrize("config", ["{not json", "[]", "", "5"])
def test_a_broken_configuration_is_the_users_problem(root: Path, config: str) -> None:
    folder_with(root, "model.safetensors", config=config)
    assert "config.json" in refused(model, "model", root)


def test_code_of_the_models_own_is_refused_unless_allowed(root: Path, cache: Path) -> None:
    config = json.dumps({"auto_map": {"AutoModel": "modeling.Model"}})
    folder = folder_with(root, "model.safetensors", config=config)
    assert "DYNOTUNE_ALLOW_REMOTE_CODE" in refused(model, "model", root)
    assert "DYNOTUNE_ALLOW_REMOTE_CODE" in refused(model, "model", root, weights="random")
    assert model("model", root, code=True) == folder
    put_in_cache(cache, "model", "org/code", COMMIT, {"config.json": config.encode(), "model.safetensors": b""}, "main")
    assert "DYNOTUNE_ALLOW_REMOTE_CODE" in refused(model, "org/code", root)


def test_pickled_weights_are_refused_unless_allowed_or_not_wanted(root: Path) -> None:
    folder = folder_with(root, "pytorch_model.bin")
    assert "pickle" in refused(model, "model", root)
    assert model("model", root, weights="random") == model("model", root, pickle=True) == folder
    (folder / "model.safetensors").write_bytes(b"")
    assert model("model", root) == folder


def test_a_folder_without_weights_says_how_to_draw_them(root: Path) -> None:
    folder = folder_with(root)
    assert "weights: random" in refused(model, "model", root)
    assert model("model", root, weights="random") == folder


def test_a_file_that_only_calls_itself_safetensors_opens_no_way_to_a_pickle(llama: Path, tmp_path: Path) -> None:
    """The check looks at names; what loads must hold to it."""
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    (folder / "adapter.safetensors").write_bytes(b"")
    (folder / "pytorch_model.bin").write_bytes(b"never unpickled")
    data = tiny.write(tmp_path / "rows.jsonl", tiny.pairs(20))
    with pytest.raises(TrainingError):
        tiny.bundle(tiny.job(folder, data))


@pytest.mark.parametrize("size", [0, 4, 2000, -100])
def test_a_download_that_was_cut_short_is_the_users_problem(llama: Path, tmp_path: Path, size: int) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:size])
    data = tiny.write(tmp_path / "rows.jsonl", tiny.pairs(20))
    assert "model.source" in refused(tiny.bundle, tiny.job(folder, data))


def test_a_tokenizer_that_does_not_load_is_the_users_problem(llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    data = tiny.write(tmp_path / "rows.jsonl", tiny.pairs(20))
    assert "tokenizer" in refused(tiny.bundle, tiny.job(folder, data))


@pytest.mark.parametrize("change", [{"num_attention_heads": 7}, {"model_type": "nobody-knows-it"}])
def test_a_configuration_that_transformers_refuses_is_the_users_problem(
    llama: Path, functions: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    folder = tiny.changed(llama, tmp_path / "model", **change)
    sentence = refused(tiny.bundle, tiny.job(folder, functions))
    assert sentence.startswith("model.source: ") and not sentence.endswith((".", ":", "upgr"))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("It is wrong.\nDo another thing.", "It is wrong"),
        ("It takes one of:\n(1) this\n(2) that", "It takes one of: (1) this (2) that"),
        ("It takes one of: \n(1) this, \n(2) that", "It takes one of: (1) this, (2) that"),
        ("word " * 100, "word " * 79 + "…"),
    ],
)
def test_a_librarys_error_is_cut_between_words(error: str, line: str) -> None:
    assert told_in_short(ValueError(error)) == line


def test_more_tokens_than_the_model_has_positions_are_refused(llama: Path, functions: Path) -> None:
    assert "256" in refused(tiny.bundle, tiny.job(llama, functions, max_length=512))


def test_adapters_on_modules_that_are_not_there_are_refused(llama: Path, functions: Path) -> None:
    spec = tiny.job(llama, functions, lora={"target_modules": ["nowhere"]})
    assert "lora.target_modules" in refused(tiny.bundle, spec)


def test_a_model_without_linear_layers_is_said_to_have_none(
    llama: Path, functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "linear_layers", lambda _: [])
    monkeypatch.setattr(build, "with_adapter", lambda *_: (_ for _ in ()).throw(ValueError("No modules.")))
    sentence = refused(tiny.bundle, tiny.job(llama, functions), "lora")
    assert sentence == "lora.target_modules: No modules; it has no linear layers"


def test_parameters_are_counted(llama: Path, functions: Path) -> None:
    every, trained = build.parameter_counts(tiny.bundle(tiny.job(llama, functions), "full").model)
    assert every == trained == sum(one.numel() for one in tiny.draw("llama").parameters())
    every_lora, trained_lora = build.parameter_counts(tiny.bundle(tiny.job(llama, functions), "lora").model)
    assert every_lora == every + trained_lora and 0 < trained_lora < every / 4
