"""The exports against the trainers themselves, where they are there: `make test-exports` builds what this needs."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import sys
import typing
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml

from service.contract.hardware import HardwareFacts
from service.exports import EXPORTS, axolotl
from service.levers import LEVERS
from tests.conftest import ROOT
from tests.exports.test_targets import METHODS, made, points, reading, wheels
from tests.exports.test_train_py import _one_thread, by_worker, job, models, recommended
from tests.exports.test_trainer_script import still, trained
from tests.factory import DATASET, configuration

__all__ = ["_one_thread", "models", "still"]  # fixtures
WHEELS = ROOT / "build" / "export-wheels"
AXOLOTL = WHEELS / wheels("axolotl")["axolotl"]["wheel"]
SWIFT = WHEELS / wheels("ms-swift")["ms-swift"]["wheel"]
FACTORY = WHEELS / wheels("llamafactory")["llamafactory"]["wheel"]
# The classes of `swift sft`'s arguments by their files, each over those before it.
ARGUMENTS = {
    "trainers/arguments.py": "TrainArgumentsMixin",
    "arguments/base_args/model_args.py": "ModelArguments",
    "arguments/base_args/template_args.py": "TemplateArguments",
    "arguments/base_args/data_args.py": "DataArguments",
    "arguments/base_args/quant_args.py": "QuantizeArguments",
    "arguments/base_args/base_args.py": "BaseArguments",
    "arguments/tuner_args.py": "TunerArguments",
    "arguments/sft_args.py": "SftArguments",
}
Facts = Callable[..., HardwareFacts]
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed: make test-exports"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture
def schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Axolotl's schema with the keys of given plugins, from the wheel without what the wheel depends on."""
    with zipfile.ZipFile(AXOLOTL) as archive:
        archive.extractall(tmp_path / "axolotl")
    monkeypatch.syspath_prepend(str(tmp_path / "axolotl"))
    before = set(sys.modules)
    config = importlib.import_module("axolotl.utils.schemas.config")
    folder = tmp_path / "axolotl/axolotl/integrations"
    parts = {
        axolotl.LIGER: _module(folder / "liger/args.py").LigerArgs,
        axolotl.CUT: _module(folder / "cut_cross_entropy/args.py").CutCrossEntropyArgs,
    }
    yield lambda plugins: type("Whole", (config.AxolotlInputConfig, *(parts[plugin] for plugin in plugins)), {})
    for name in set(sys.modules) - before:
        if name.startswith("axolotl"):
            del sys.modules[name]


def _module(path: Path) -> Any:
    """The module of a file, without the package around it, which imports the trainer."""
    found = importlib.util.spec_from_file_location(f"axolotl_{path.parent.name}", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("method", METHODS)
def test_axolotls_schema_takes_the_file(
    method: str, schema: Any, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every choice that it says: nothing is refused, and what was written is what Axolotl sees."""
    for point in ({"precision": "bf16-mixed"} | one for one in [*points(method), {"precision": "fp32"}]):
        written = yaml.safe_load(EXPORTS["axolotl"].write(made(facts, method, **point)))
        if str(written["attn_implementation"]).startswith("flash"):
            continue  # it looks for a build of flash-attention on this machine
        seen = schema(written.get("plugins", []))(**written).model_dump()
        for key, value in written.items():
            name = key if key in seen else {"revision_of_model": "model_revision"}.get(key, key)
            if not isinstance(value, dict | list) and value is not None:
                assert seen[name] == value, (point, key)


@pytest.mark.usefixtures("schema")
def test_axolotls_prompts_are_of_the_jobs_columns_alone(facts: Facts) -> None:
    """A column `system` that the job does not name is no system prompt, and `input` is not added to the prompt."""
    module = importlib.import_module("axolotl.prompt_strategies.user_defined")
    (dataset,) = yaml.safe_load(EXPORTS["axolotl"].write(made(facts)))["datasets"]
    form = module.UserDefinedDatasetConfig(**dataset["type"])
    strategy = module.load(SimpleNamespace(), SimpleNamespace(train_on_inputs=False, sequence_len=8), form)
    row = {"prompt": "P", "completion": "C", "system": "S", "input": "I"}
    prompt, given, completion, system = strategy.parse_instruction_fields(row)
    assert completion == "C"
    assert "".join(strategy.prompter.build_prompt_w_system(system, prompt, given, None)) == "P"


@pytest.mark.parametrize("method", METHODS)
def test_trls_parser_takes_the_file(method: str, facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import training_args
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

    monkeypatch.setattr(training_args, "is_torch_tf32_available", lambda: True)
    monkeypatch.setattr(training_args, "enable_tf32", lambda _: None)
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
    for point in points(method):
        file = tmp_path / "trl.yaml"
        file.write_text(EXPORTS["trl.yaml"].write(made(facts, method, **point)))
        _, config, model, mixture = parser.parse_args_and_config(
            ["--config", str(file), "--output_dir", str(tmp_path)], fail_with_unknown_args=True
        )
        written = yaml.safe_load(file.read_text())
        assert mixture.datasets[0].data_files == "data/rows.jsonl"
        assert config.activation_checkpointing is written["activation_checkpointing"]
        assert config.gradient_checkpointing is written["activation_checkpointing"], "TRL checkpoints unasked"
        assert (config.bf16, config.max_length) == (written["bf16"], 512), "TRL computes in bf16 unasked"
        assert model.use_peft is (method != "full") and model.dtype == written["dtype"], point


def swift(name: str, wanted: str) -> ast.stmt:
    """A function or class of a file of ms-swift's wheel."""
    with zipfile.ZipFile(SWIFT) as archive:
        body = ast.parse(archive.read(f"swift/{name}")).body
    (found,) = [one for one in body if isinstance(one, ast.FunctionDef | ast.ClassDef) and one.name == wanted]
    return found


def fields_over(base: type, node: ast.ClassDef) -> type:
    """A dataclass of the fields of a class's source, over another one: without its methods and the help of its fields,
    which need the trainer."""
    node.bases, node.body = [ast.Name("Base", ast.Load())], [one for one in node.body if isinstance(one, ast.AnnAssign)]
    for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
        call.keywords = [one for one in call.keywords if one.arg != "metadata"]
    names = vars(typing) | vars(dataclasses) | {"Base": base, "__name__": __name__}
    whole = ast.fix_missing_locations(ast.Module([node], []))
    exec(compile(whole, "fields", "exec", dont_inherit=True), names)  # with annotations that are no text
    made_of: type = names[node.name]
    return made_of


@pytest.mark.parametrize("method", METHODS)
def test_swifts_parser_takes_the_file(method: str, facts: Facts, tmp_path: Path) -> None:
    """As `swift sft` reads it: the file becomes a command line, which transformers' parser reads."""
    from transformers import HfArgumentParser, Seq2SeqTrainingArguments

    reader: dict[str, Any] = {"json": json, "yaml": yaml, "os": SimpleNamespace(environ={})}
    exec(compile(ast.Module([swift("cli/main.py", "parse_yaml_args")], []), "main", "exec"), reader)
    known: type = Seq2SeqTrainingArguments
    for name, wanted in ARGUMENTS.items():
        node = swift(name, wanted)
        assert isinstance(node, ast.ClassDef)
        known = fields_over(known, node)
    parser, file = HfArgumentParser([known]), tmp_path / "ms-swift.yaml"
    for point in points(method):
        file.write_text(EXPORTS["ms-swift"].write(made(facts, method, **point)))
        arguments = [str(file)]
        reader["parse_yaml_args"](arguments)
        seen = vars(parser.parse_args(arguments))
        for key, value in yaml.safe_load(file.read_text()).items():
            read = json.loads(seen[key]) if isinstance(value, dict) else seen[key]
            assert read == value, (point, key)


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """LLaMA-Factory's own reader of its file, from the wheel without what the wheel depends on."""
    with zipfile.ZipFile(FACTORY) as archive:
        archive.extractall(tmp_path / "factory")
    monkeypatch.syspath_prepend(str(tmp_path / "factory"))
    monkeypatch.setitem(sys.modules, "omegaconf", SimpleNamespace(DictConfig=dict, OmegaConf=None))  # for other files
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    place = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    before = set(sys.modules)
    yield importlib.import_module("llamafactory.hparams.parser").get_train_args
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in set(sys.modules) - before:
        if name.startswith("llamafactory"):
            del sys.modules[name]


@pytest.mark.parametrize("columns", [("prompt", "completion"), ("messages",), ("text",)])
def test_llamafactorys_checks_take_the_file(columns: tuple[str, ...], factory: Any, facts: Facts) -> None:
    """Packed or not, with the loss on answers or on everything: it refuses some of these at some of its stages."""
    for batching, loss_on in (("padded", "completion"), ("padded", "all"), ("packed", "completion"), ("packed", "all")):
        found = reading(made(facts, batching=batching), columns)
        found.spec["training"] |= {"loss_on": loss_on}
        written = yaml.safe_load(EXPORTS["llamafactory"].write(found))
        _, data, training, _, _ = factory(dict(written))
        assert (data.packing, data.neat_packing) == (written["packing"], written["neat_packing"])
        assert training.per_device_train_batch_size == written["per_device_train_batch_size"]


# What the data's file holds, their columns and form -> what Unsloth's SFTTrainer is given of each row.
SHARED = [{"from": "human", "value": "name"}, {"from": "gpt", "value": "path"}]
READ: dict[str, tuple[str, str, dict[str, str], dict[str, Any], dict[str, Any]]] = {
    "csv": (
        "rows.csv",
        "\ufeffasked;answer;more\n" + "007;NA;x\n" * 8,
        {"prompt": "asked", "completion": "answer"},
        {"csv_options": {"delimiter": ";"}},
        {"prompt": "007", "completion": "NA"},
    ),
    "numbers": (
        "rows.jsonl",
        (json.dumps({"prompt": 7, "completion": None, "more": "x"}) + "\n") * 8,
        {"prompt": "prompt", "completion": "completion"},
        {"numbers_as_text": True},
        {"prompt": "7", "completion": ""},
    ),
    "sharegpt": (
        "rows.jsonl",
        (json.dumps({"messages": SHARED, "more": 1}) + "\n") * 8,
        {"messages": "messages"},
        {"sharegpt": True},
        {"messages": [{"role": "user", "content": "name"}, {"role": "assistant", "content": "path"}]},
    ),
}


@pytest.mark.parametrize("case", READ)
def test_unsloth_is_given_the_rows_as_they_were_measured(
    case: str, facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the library that reads the files there; Unsloth itself needs a GPU."""
    name, text, columns, form, row = READ[case]
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = made(facts)
    found.spec["dataset"] |= {"source": str(tmp_path / name)}
    changes = {"columns": columns, "form": DATASET.form.model_copy(update=form), "formats": (Path(name).suffix,)}
    found = found.model_copy(update={"dataset": DATASET.model_copy(update=changes)})
    model, trainer = Mock(), Mock()
    model.from_pretrained.return_value = (Mock(), Mock())
    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace(FastLanguageModel=model))
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(SFTConfig=Mock(), SFTTrainer=trainer))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "unsloth_train.py").write_text(EXPORTS["unsloth"].write(found))
    _module(tmp_path / "unsloth_train.py").main()
    assert list(trainer.call_args.kwargs["train_dataset"])[0] == row


TALK = [{"role": "user", "content": "name"}, {"role": "assistant", "content": "path"}]
MARKED = (
    "{% for one in messages %}{{ one['role'] }}: {% if one['role'] == 'assistant' %}"
    "{% generation %}{{ one['content'] }}{% endgeneration %}{% else %}{{ one['content'] }}{% endif %}\n{% endfor %}"
)


def start_trl(still: Path, row: dict[str, Any], columns: tuple[str, ...], facts: HardwareFacts, template: str) -> None:
    """What `trl sft` does with the exported file for data of such rows, in one step."""
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser
    from trl.scripts.sft import main

    made_of = configuration("lora", 8, 2)
    spec = job(still, made_of)
    (still / "data.jsonl").write_text((json.dumps(row) + "\n") * 40)
    (still / "template.jinja").write_text(template)
    source = {"source": str(still / "data.jsonl")}
    spec = spec.model_copy(update={"dataset": spec.dataset.model_copy(update=source)})
    (still / "trl.yaml").write_text(EXPORTS["trl.yaml"].write(reading(recommended(spec, made_of, facts), columns)))
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
    more = [
        "--output_dir",
        str(still / "out"),
        "--max_steps",
        "1",
        "--chat_template_path",
        str(still / "template.jinja"),
    ]
    main(*parser.parse_args_and_config(["--config", str(still / "trl.yaml"), *more]))


@pytest.mark.parametrize("row", [{"text": "return name"}, {"messages": TALK}])
def test_trl_trains_whatever_other_columns_the_data_has(row: dict[str, Any], still: Path, facts: Facts) -> None:
    start_trl(still, row | {"prompt": "name", "prompt_id": "7"}, tuple(row), facts(), MARKED)
    assert (still / "out" / "adapter_config.json").is_file()


def test_trl_does_not_start_without_marks_in_the_template(still: Path, facts: Facts) -> None:
    with pytest.raises(ValueError, match="generation"):
        start_trl(still, {"messages": TALK}, ("messages",), facts(), "{{ messages[0]['content'] }}")


CASES: dict[str, dict[str, str]] = {
    "lora": {"method": "lora", "batching": "sorted", "head": "chunked"},
    "full": {"method": "full", "batching": "grouped", "optimizer": "adamw-loop"},
    "every second layer": {"method": "lora", "checkpointing": "every-2", "padding": "multiple-8"},
    "selective": {"method": "full", "checkpointing": "selective"},
    "bf16": {"method": "full", "precision": "bf16-mixed"},
    "without a mask": {"method": "lora", "attention": "varlen", "batching": "grouped", "head": "chunked"},
    "vocabulary": {"method": "full", "vocabulary": "multiple-64"},
}


@pytest.mark.parametrize("case", CASES)
def test_trl_learns_as_the_trial_did(case: str, still: Path, tmp_path: Path, facts: Facts) -> None:
    """Step by step: the same loss, so the same samples, model and update."""
    made_of = configuration(effective=8, micro=2, **CASES[case]).model_copy(update={"learning_rate": 5e-3})
    spec = job(still, made_of)
    lines = trained("trl", spec, made_of, facts(), tmp_path)
    results, _ = by_worker(spec, made_of, 2)
    steps = [line for line in lines if "grad_norm" in line]
    assert steps[0]["loss"] == pytest.approx(results[0].loss, rel=1e-3)
    close = 2e-2 if "precision" in CASES[case] else 1e-3
    assert [line["loss"] for line in steps] == pytest.approx([one.loss for one in results], rel=close)


def test_trl_packs_the_samples(still: Path, tmp_path: Path, facts: Facts) -> None:
    """An epoch's samples in rows of max_length, a row a micro batch, as its attention has a mask."""
    made_of = configuration("lora", 8, 2, batching="packed").model_copy(update={"learning_rate": 5e-3})
    lines = trained("trl", job(still, made_of), made_of, facts(), tmp_path)
    results, _ = by_worker(job(still, made_of), made_of, 2)
    losses = [line["loss"] for line in lines if "grad_norm" in line]
    assert losses[0] == pytest.approx(results[0].loss, rel=0.05), "other samples, the same model"
    assert LEVERS["batching"].choice("packed").function == "packed_within"
