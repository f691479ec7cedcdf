"""The exports against the trainers themselves, where they are there: `make test-exports` builds what this needs."""

from __future__ import annotations

import importlib.util
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from service.contract.hardware import HardwareFacts
from service.exports import EXPORTS, axolotl
from service.levers import LEVERS
from tests.conftest import ROOT
from tests.exports.test_targets import METHODS, made, points, reading, wheels
from tests.exports.test_train_py import _one_thread, by_worker, job, models, recommended
from tests.exports.test_trainer_script import still, trained
from tests.factory import configuration

__all__ = ["_one_thread", "models", "still"]  # fixtures
AXOLOTL = ROOT / "build" / "export-wheels" / wheels("axolotl")["axolotl"]["wheel"]
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
