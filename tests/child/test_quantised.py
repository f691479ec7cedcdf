"""Quantised weights are kept, and those loaded again are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.child import tiny
from tests.factory import configuration
from worker.child import quantised
from worker.child.build import build


@pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing:FutureWarning")  # peft asks by the old name
@pytest.mark.parametrize("choice", ["nf4-double", "nf4", "int8"])
def test_kept_weights_are_the_same_and_nothing_is_quantised_again(
    llama: Path, functions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    spec = tiny.job(llama, functions, method="qlora")
    workplace = tiny.workplace(llama, functions.parent, quantised_weights=tmp_path / "kept")
    made = configuration("qlora", 8, precision="fp32", quantization=choice)

    def states() -> tuple[dict[str, Any], Any]:
        bundle = build(spec, made, tiny.device(), workplace, seed=0)
        return bundle.model.state_dict(), bundle

    first, bundle = states()
    assert len(list((tmp_path / "kept").iterdir())) == 1 and bundle.quantising_seconds <= 0
    monkeypatch.setattr(quantised, "_keep", None)
    second, again = states()
    assert first.keys() == second.keys()
    assert all(torch.equal(one, second[name]) for name, one in first.items() if isinstance(one, torch.Tensor))
    kinds = {type(module).__name__ for module in again.model.modules()}
    assert kinds & {"Linear4bit", "Linear8bitLt"}


def test_other_weights_have_another_key(llama: Path, tmp_path: Path) -> None:
    from transformers import BitsAndBytesConfig

    four, eight = BitsAndBytesConfig(load_in_4bit=True), BitsAndBytesConfig(load_in_8bit=True)
    one = quantised.Asked(llama, four, "causal-lm 0")
    assert one.key == quantised.Asked(llama, BitsAndBytesConfig(load_in_4bit=True), "causal-lm 0").key
    compute = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    assert one.key == quantised.Asked(llama, compute, "causal-lm 0").key, "the weights are the same"
    others = [quantised.Asked(llama, eight, "causal-lm 0"), quantised.Asked(llama, four, "causal-lm 1")]
    other = tiny.save("llama", tmp_path / "other", seed=1)
    others.append(quantised.Asked(other, four, "causal-lm 0"))
    assert len({one.key, *(asked.key for asked in others)}) == 4


@pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing:FutureWarning")
def test_what_is_broken_is_made_anew(llama: Path, functions: Path, tmp_path: Path) -> None:
    spec = tiny.job(llama, functions, method="qlora")
    workplace = tiny.workplace(llama, functions.parent, quantised_weights=tmp_path / "kept")
    made = configuration("qlora", 8, precision="fp32")
    build(spec, made, tiny.device(), workplace, seed=0)
    (kept,) = (tmp_path / "kept").iterdir()
    (kept / "model.safetensors").write_bytes(b"not weights")
    build(spec, made, tiny.device(), workplace, seed=0)
    assert (kept / "model.safetensors").stat().st_size > 1000
    build(
        spec,
        made.model_copy(update={"levers": made.levers | {"precision": "bf16-mixed"}}),
        tiny.device(),
        workplace,
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
