"""The script for transformers' Trainer: it takes the trial's samples and learns from them what the trial learnt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.contract.child import Workplace
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import DatasetFacts
from service.exports import EXPORTS
from tests.exports.test_train_py import STEPS, _one_thread, by_worker, job, models, recommended, script
from tests.factory import configuration
from worker.child.build import build
from worker.devices import open_device

__all__ = ["_one_thread", "models"]  # fixtures

pytestmark = [
    pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing.:FutureWarning"),  # peft, by the old name
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),  # there is nothing to pin for
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
CASES: dict[str, tuple[dict[str, str], str, dict[str, Any]]] = {
    "lora": ({"method": "lora", "batching": "padded"}, "causal-lm", {}),
    "full, sorted": ({"method": "full", "batching": "sorted", "optimizer": "adamw-loop"}, "causal-lm", {}),
    "grouped, chunked": ({"method": "lora", "batching": "grouped", "head": "chunked"}, "causal-lm", {}),
    "every second layer": ({"method": "full", "checkpointing": "every-2", "padding": "multiple-8"}, "causal-lm", {}),
    "code of ours": ({"method": "lora", "checkpointing": "selective", "adapter": "rslora"}, "causal-lm", {}),
    "offloaded": ({"method": "lora", "checkpointing": "offloaded"}, "causal-lm", {}),
    "fused projections": ({"method": "lora", "projections": "fused", "checkpointing": "full"}, "causal-lm", {}),
    "compiled": ({"method": "full", "compile": "per-layer-aot-eager"}, "causal-lm", {}),  # as in test_train_py.py
    "bf16": ({"method": "full", "precision": "bf16-mixed"}, "causal-lm", {"schedule": "cosine"}),
    "8 bit": ({"method": "full", "optimizer": "adamw-8bit"}, "causal-lm", {"schedule": "constant"}),
    "qlora": ({"method": "qlora", "optimizer": "adamw-8bit"}, "causal-lm", {}),
    "all tokens": ({"method": "full", "attention": "varlen"}, "causal-lm", {"loss_on": "all"}),
    "classification": ({"method": "full", "batching": "sorted"}, "sequence-classification", {}),
    "classification lora": ({"method": "lora", "precision": "fp32"}, "sequence-classification", {}),
    "masked": ({"method": "full", "batching": "padded"}, "masked-lm", {}),
}


def trained(
    name: str, spec: JobSpec, made: Any, facts: HardwareFacts, folder: Path, read: DatasetFacts | None = None
) -> list[dict[str, Any]]:
    """What the exported script logs in STEPS optimizer steps; `read` is what is known of the data."""
    found = recommended(spec, made, facts)
    module = script(EXPORTS[name].write(found.model_copy(update={"dataset": read or found.dataset})), folder)
    log = folder / "log.jsonl"
    module.main(["--max-steps", str(STEPS), "--device", "cpu", "--output", str(folder / "out"), "--log", str(log)])
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture
def still(models: Path, tmp_path: Path) -> Path:
    """The models without dropout, whose numbers Trainer draws in another order."""
    folder = tmp_path / "models"
    shutil.copytree(models, folder)
    for path in folder.glob("*/config.json"):
        config = json.loads(path.read_text())
        path.write_text(json.dumps({name: 0.0 if "dropout" in name else value for name, value in config.items()}))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_trainer_learns_as_the_trial_did(
    case: str, still: Path, tmp_path: Path, facts: Callable[..., HardwareFacts]
) -> None:
    """Step by step over two epochs: the same loss and gradient norm, so the same samples, model, loss and update."""
    levers, task, training = CASES[case]
    made = configuration(effective=8, micro=2, **levers).model_copy(update={"learning_rate": 5e-3})
    spec = job(still, made, task, **training)
    spec = spec.model_copy(update={"lora": spec.lora.model_copy(update={"dropout": 0.0})})
    lines = trained("trainer", spec, made, facts(), tmp_path)
    results, theirs = by_worker(spec, made, 2)
    steps = [line for line in lines if "grad_norm" in line]
    close = 2e-2 if "precision" in levers else 1e-3
    assert steps[0]["loss"] == pytest.approx(results[0].loss, rel=1e-3)
    assert [line["loss"] for line in steps] == pytest.approx([one.loss for one in results], rel=close)
    assert [line["grad_norm"] for line in steps] == pytest.approx([one.grad_norm for one in results], rel=5 * close)
    (held_out,) = [line["eval_loss"] for line in lines[-1:]]
    if task == "causal-lm" and "loss_on" not in training:
        assert held_out == pytest.approx(theirs.loss, rel=0.05), "Trainer's is a mean of means over batches"


def test_trainer_learns_a_chat_as_the_trial_did(
    still: Path, tmp_path: Path, facts: Callable[..., HardwareFacts]
) -> None:
    """Conversations by a chat template, of which the assistant's turns are learnt."""
    words = ["value", "return", "name", "range", "class", "import"]
    chats = [
        [
            {"role": "user", "content": " ".join(words[: at % 5 + 1])},
            {"role": "assistant", "content": " ".join(words[at % 4 :])},
        ]
        for at in range(40)
    ]
    (still / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    made = configuration("lora", 8, 2, batching="sorted").model_copy(update={"learning_rate": 5e-3})
    spec = job(still, made)
    source = {"source": str(still / "chats.jsonl"), "chat_template": "chatml"}
    spec = spec.model_copy(update={"dataset": spec.dataset.model_copy(update=source)})
    place = Workplace(device="cpu", data_roots=(Path("/"),), hub_cache=Path("/nowhere"))
    read = build(spec, made, open_device("cpu"), place, spec.training.seed).data.facts
    lines = trained("trainer", spec, made, facts(), tmp_path, read)
    results, _ = by_worker(spec, made, 2)
    losses = [line["loss"] for line in lines if "grad_norm" in line]
    assert read.columns == {"messages": "messages"}
    assert losses == pytest.approx([one.loss for one in results], rel=1e-3)
