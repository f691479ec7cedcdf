"""Quantised weights are kept, and those loaded again are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.child import tiny
from tests.factory import configuration
from worker.child import quantised, soak, steps
from worker.child.arrange import plan_of
from worker.child.build import build, recipe_of


@pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing:FutureWarning")  # peft asks by the old name
@pytest.mark.parametrize("choice", ["nf4-double", "nf4", "int8"])
def test_kept_weights_are_the_same_and_nothing_is_quantised_again(
    llama: Path, functions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    spec = tiny.job(llama, functions, method="qlora")
    place = tiny.workplace(llama, functions.parent, quantised_weights=tmp_path / "kept")
    made = configuration("qlora", 8, precision="fp32", quantization=choice)

    def states() -> tuple[dict[str, Any], Any]:
        bundle = build(spec, made, tiny.device(), place, seed=0)
        return bundle.model.state_dict(), bundle

    first, bundle = states()
    assert len(list((tmp_path / "kept").iterdir())) == 1 and bundle.quantising_seconds <= 0
    monkeypatch.setattr(quantised, "_keep", None)
    second, again = states()
    assert first.keys() == second.keys()
    assert all(torch.equal(one, second[name]) for name, one in first.items() if isinstance(one, torch.Tensor))
    kinds = {type(module).__name__ for module in again.model.modules()}
    assert kinds & {"Linear4bit", "Linear8bitLt"}


@pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing:FutureWarning")
def test_drawn_layers_are_known_though_they_are_among_the_kept_weights(tmp_path: Path, reviews: Path) -> None:
    transformers.BertForMaskedLM(tiny.config("bert")).save_pretrained(tmp_path / "bert")
    source = tiny.with_tokenizer(tmp_path / "bert")
    spec = tiny.job(source, reviews, task="sequence-classification", method="qlora")
    place = tiny.workplace(source, reviews.parent, quantised_weights=tmp_path / "kept")
    made = configuration("qlora", 8, precision="fp32")
    first, again = (build(spec, made, tiny.device(), place, seed=0).model for _ in range(2))
    trained = {name: weight for name, weight in first.named_parameters() if weight.requires_grad}
    assert any("pooler" in name for name in trained)
    assert {name for name, weight in again.named_parameters() if weight.requires_grad} == trained.keys()
    assert all(torch.equal(weight, again.get_parameter(name)) for name, weight in trained.items())


def test_other_weights_have_another_key(llama: Path, functions: Path, tmp_path: Path) -> None:
    other = tiny.save("llama", tmp_path / "other", seed=1)

    def key(model: Path = llama, seed: int = 0, compute: str | None = None, **levers: Any) -> str:
        recipe = recipe_of(tiny.job(model, functions, method="qlora"), configuration("qlora", 8, **levers))
        return quantised.key_of(model, tiny.config("llama"), replace(recipe, seed=seed, autocast=compute))

    assert key() == key() == key(compute="bfloat16"), "the arithmetic does not change the weights"
    assert len({key(), key(quantization="int8"), key(seed=1), key(other)}) == 4


@pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing:FutureWarning")
def test_what_is_broken_is_made_anew(llama: Path, functions: Path, tmp_path: Path) -> None:
    spec = tiny.job(llama, functions, method="qlora")
    place = tiny.workplace(llama, functions.parent, quantised_weights=tmp_path / "kept")
    made = configuration("qlora", 8, precision="fp32")
    build(spec, made, tiny.device(), place, seed=0)
    (kept,) = (tmp_path / "kept").iterdir()
    (kept / "model.safetensors").write_bytes(b"not weights")
    build(spec, made, tiny.device(), place, seed=0)
    assert (kept / "model.safetensors").stat().st_size > 1000
    build(
        spec,
        made.model_copy(update={"levers": made.levers | {"precision": "bf16-mixed"}}),
        tiny.device(),
        place,
        seed=0,
    )
    assert len(list((tmp_path / "kept").iterdir())) == 2, "the parts that stay unquantised are kept in another format"


@pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing:FutureWarning")
def test_a_full_disk_keeps_nothing(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError(28, "No space left on device")

    quantised._keep(Full(), tmp_path / "kept" / "key", 1.0)
    assert list((tmp_path / "kept").iterdir()) == []


@pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing:FutureWarning")
def test_an_evaluation_leaves_the_layout_of_4_bit_weights_alone(
    llama: Path, functions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU with AVX512-BF16, bitsandbytes packs them anew when it first evaluates, and training goes on after."""
    import bitsandbytes.nn.modules

    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: True)
    place = tiny.workplace(llama, functions.parent, quantised_weights=tmp_path / "kept")
    spec = tiny.job(llama, functions, method="qlora")
    for _ in range(2):  # quantised here, then loaded as they were kept
        bundle = build(spec, configuration("qlora", 8, precision="fp32"), tiny.device(), place, seed=0)
        step = plan_of(bundle, list(range(8)), micro=4)[0]
        before = steps.reference_step(bundle, step)
        soak.evaluate(bundle, 4)
        assert steps.reference_step(bundle, step) == before
