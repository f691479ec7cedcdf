"""The estimate from fake tensors, against what a real step takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from service.contract.child import Workplace
from service.contract.estimate import EstimateRequest, Known
from service.contract.measurement import MemoryLine
from tests.child import tiny
from tests.factory import configuration
from training.errors import TrainingError
from training.recipe import task_of
from worker.child.fake import Storages
from worker.child.memory_estimate import OF_THE_HOST, _largest, estimate, step_sizes

# peft 0.21 uses the names that transformers before 5.23 has; 5.23 calls them deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing(_enable)?. is deprecated:FutureWarning")


def workplace(folder: Path) -> Workplace:
    return tiny.workplace(folder.parent)


def levers(**changes: Any) -> dict[str, str]:
    return configuration("lora", 8, **({"precision": "fp32", "attention": "sdpa"} | changes)).levers


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_peaks_are_those_of_real_tensors(kind: str, method: str, request: Any, tmp_path: Path) -> None:
    """The same step on real tensors under the same counting: shapes and lifetimes agree."""
    folder: Path = request.getfixturevalue(kind)
    task = {"llama": "causal-lm", "bert": "sequence-classification"}[kind]
    rows = tiny.pairs(8) if kind == "llama" else [{"text": "return self", "label": one % 3} for one in range(8)]
    spec = tiny.job(folder, tiny.write(tmp_path / "rows.jsonl", rows), max_length=32, task=task)
    sizes = step_sizes(spec, method, levers(), 32, workplace(folder))  # type: ignore[arg-type]
    bundle = tiny.bundle(spec, method)
    ids = torch.ones((2, 32), dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    if kind == "bert":
        batch |= {"attention_mask": torch.ones_like(ids), "labels": ids[:, 0]}
    with Storages() as storages:
        for tensor in (*bundle.model.parameters(), *bundle.model.buffers()):
            storages.add(tensor)
        for parameter in bundle.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        task_of(bundle.recipe).summed_loss(bundle.model, batch, torch.tensor(64)).backward()  # type: ignore[no-untyped-call]
    assert sizes.peaks[1] == pytest.approx(storages.peak, rel=0.03)


def test_all_methods_in_the_order_they_need_memory(llama: Path, tmp_path: Path, facts: Any) -> None:
    spec = tiny.job(llama, tmp_path / "none.jsonl", max_length=64, training={})
    found = estimate(EstimateRequest(spec=spec, memory_gib=2), facts(), (), workplace(llama))
    assert set(found.methods) == {"lora", "qlora", "full"} and found.seconds < 60
    lora, qlora, full = (found.methods[name] for name in ("lora", "qlora", "full"))
    assert qlora.weights_gib < min(lora.weights_gib, full.weights_gib)
    assert full.gradients_gib > lora.gradients_gib and full.optimizer_gib == pytest.approx(2 * full.gradients_gib)
    assert full.trainable_parameters == full.parameters > lora.trainable_parameters
    assert 0 < full.largest_micro_batch <= lora.largest_micro_batch
    assert found.statement.endswith("nothing was run. " + OF_THE_HOST.strip()), "which the job has left open"


def test_no_more_than_asked_for_and_with_too_little_memory_what_one_sample_needs(
    llama: Path, tmp_path: Path, facts: Any
) -> None:
    search = {"max_micro_batch_size": 3}
    spec = tiny.job(llama, tmp_path / "none.jsonl", max_length=64, search=search)
    enough = estimate(EstimateRequest(spec=spec, memory_gib=2), facts(), (), workplace(llama))
    assert {one.largest_micro_batch for one in enough.methods.values()} == {3}
    assert all(one.note.startswith("limited by search.max_micro_batch_size; ") for one in enough.methods.values())
    found = estimate(EstimateRequest(spec=spec, memory_gib=0.01), facts(), (), workplace(llama))
    assert all(one.largest_micro_batch == 0 and "one sample needs" in one.note for one in found.methods.values())


@pytest.mark.parametrize("change", [{"num_attention_heads": 7}, {"model_type": "nobody-knows-it"}])
def test_a_configuration_that_transformers_refuses_is_told_as_in_a_job(
    llama: Path, tmp_path: Path, facts: Any, change: dict[str, Any]
) -> None:
    folder = tiny.changed(llama, tmp_path / "model", **change)
    request = EstimateRequest(spec=tiny.job(folder, tmp_path / "none.jsonl", max_length=64), memory_gib=2)
    with pytest.raises(TrainingError) as refused:
        estimate(request, facts(), (), workplace(folder))
    sentence = str(refused.value)
    assert sentence.startswith("model.source: its config.json") and "\n" not in sentence and not sentence.endswith(":")


def test_what_limits_the_largest_micro_batch_is_told(llama: Path) -> None:
    line = MemoryLine(rest_bytes=1e9, slope_bytes=1e8)

    def found(effective: int | None, most: int | None, capacity: float = 2e9) -> tuple[int, str]:
        training, search = {"effective_batch_size": effective}, {"max_micro_batch_size": most}
        return _largest(tiny.job(llama, llama, training=training, search=search), line, capacity)

    assert found(8, 9) == (8, "limited by training.effective_batch_size; 10 would fit")
    assert found(9, 8) == (8, "limited by search.max_micro_batch_size; 10 would fit")
    assert found(10, None) == found(None, None) == (10, "")
    assert found(8, 8, 1.05e9) == (0, "one sample needs 1.02 GiB")


def test_a_measurement_corrects_it(llama: Path, tmp_path: Path, facts: Any) -> None:
    spec = tiny.job(llama, tmp_path / "none.jsonl", max_length=64, training={})
    request = EstimateRequest(spec=spec, memory_gib=2)
    plain = estimate(request, facts(), (), workplace(llama)).methods["lora"]
    line = plain.line.model_copy(update={"slope_bytes": plain.line.slope_bytes * 1.5})
    known = Known(method="lora", levers=plain.levers, max_length=64, line=line)
    found = estimate(request, facts(), (known,), workplace(llama))
    corrected = found.methods["lora"]
    assert corrected.corrected and "corrected by a measurement" in found.statement
    assert corrected.line.slope_bytes == pytest.approx(1.5 * plain.line.slope_bytes, rel=0.01)
    assert not found.methods["full"].corrected


def test_checkpointing_leaves_fewer_activations(llama: Path, tmp_path: Path) -> None:
    spec = tiny.job(llama, tmp_path / "none.jsonl", max_length=64)
    plain, saving = (
        step_sizes(spec, "lora", levers(checkpointing=choice), 64, workplace(llama)) for choice in ("off", "full")
    )
    assert saving.held[1] - saving.held[0] < 0.9 * (plain.held[1] - plain.held[0])
