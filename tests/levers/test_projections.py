"""Projections computed otherwise have the gradients that peft's have, whatever is around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer

from tests.child import tiny
from training.errors import TrainingError
from training.levers import projections
from training.levers.compile import layers_of
from worker.child import steps
from worker.child.arrange import plan_of
from worker.child.build import Bundle

SAMPLES = list(range(8))
Build = Callable[..., Bundle]


@pytest.fixture
def build(llama: Path, functions: Path) -> Build:
    def make(method: str = "lora", dropout: float = 0.0, **levers: Any) -> Bundle:
        return tiny.bundle(tiny.job(llama, functions, lora={"r": 4, "alpha": 8, "dropout": dropout}), method, **levers)

    return make


def gradients(bundle: Bundle) -> dict[str, torch.Tensor]:
    """Of a step of accumulated micro batches, with B matrices that are not zero."""
    torch.manual_seed(3)
    for name, parameter in bundle.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    (step,) = plan_of(bundle, SAMPLES, 4, 8)
    batches, terms, _ = steps.prepare(bundle, step)
    for batch in batches:
        steps.forward_backward(bundle, batch, torch.tensor(terms))
    return tiny.gradients(bundle.model)


@pytest.mark.parametrize(
    ("method", "levers", "away"),
    [
        ("lora", {}, 1e-6),
        ("lora", {"checkpointing": "full"}, 1e-6),
        ("lora", {"checkpointing": "every-2", "batching": "packed"}, 1e-6),
        ("lora", {"precision": "bf16-mixed"}, 2e-3),
        ("qlora", {}, 1e-6),
        ("qlora", {"quantization": "nf4", "checkpointing": "full"}, 1e-6),
    ],
)
def test_fused_gradients_are_pefts(build: Build, method: str, levers: dict[str, str], away: float) -> None:
    plain, fused = (gradients(build(method, projections=one, **levers)) for one in ("peft", "fused"))
    assert tiny.furthest(plain, fused) < away


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16", "fp32"])
def test_without_the_cast_the_numbers_are_the_same(build: Build, precision: str) -> None:
    """Without autocast the cast is needed, where the base has 16 bits and the adapter 32."""
    plain, uncast = (gradients(build(precision=precision, projections=one)) for one in ("peft", "without-cast"))
    assert tiny.furthest(plain, uncast) == 0.0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
def test_layers_without_the_cast_are_one_graph(build: Build, precision: str) -> None:
    bundle = build(precision=precision, projections="without-cast")
    bundle.model.enable_input_require_grads()
    torch._dynamo.reset()
    layers_of(bundle.model)[0].compile(fullgraph=True, backend="eager")
    (step,) = plan_of(bundle, SAMPLES, 8, 8)
    batches, terms, _ = steps.prepare(bundle, step)
    assert steps.optimizer_step(bundle, batches, terms)
    torch._dynamo.reset()


def test_a_peft_that_casts_otherwise_is_said(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(BaseTunerLayer, "_cast_input_dtype")
    with pytest.raises(TrainingError, match="casts the inputs of adapters elsewhere"):
        build(projections="without-cast")


def test_siblings_are_computed_once(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, calls = build(projections="fused"), []
    real = projections.together

    def counted(x: Any, group: list[Any]) -> Any:
        calls.append(len(group))
        return real(x, group)

    monkeypatch.setattr(projections, "together", counted)
    bundle.model(input_ids=torch.ones((1, 4), dtype=torch.long, device=tiny.DEVICE))
    assert sorted(calls) == [1, 1, 1, 1, 2, 2, 3, 3], "two layers: q k v, o, gate up, down"


def test_an_adapter_with_dropout_is_not_fused(build: Build) -> None:
    with pytest.raises(TrainingError, match="adapters have dropout"):
        build(projections="fused", dropout=0.1)


def test_projections_that_do_not_share_their_input_are_each_computed_alone() -> None:
    """A MobileBERT's value is made of something wider than its query and key are."""

    class Mixed(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (torch.nn.Linear(size, 4) for size in (8, 8, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.query(x) + self.key(x) + self.value(x[:, :6])
            return found

    model: Any = get_peft_model(Mixed(), LoraConfig(r=2, target_modules=["query", "key", "value"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    x = torch.randn(3, 8)
    expected = model(x)
    projections.fused_projections(model)
    assert torch.allclose(model(x), expected, atol=1e-6)
