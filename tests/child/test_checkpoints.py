"""Checkpoints that are not what a job needs: refused in one sentence, or noted, before anything is measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.child import tiny
from tests.child.test_data_mistakes import refused
from training.model import check_vocabulary
from worker.child.build import check_padding, unmatched_modules


@pytest.mark.parametrize(("kind", "task"), [("llama", "causal-lm"), ("bert", "masked-lm")])
def test_an_adapter_needs_a_checkpoint_with_its_output_layer(
    tmp_path: Path, reviews: Path, kind: str, task: str
) -> None:
    """Drawn, frozen and not saved, it would be another one for whoever loads the adapter."""
    config = tiny.config(kind)
    config.tie_word_embeddings = False
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / kind)
    tiny.with_tokenizer(tmp_path / kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / kind)
    tokenizer.mask_token = tokenizer.convert_ids_to_tokens(9)
    tokenizer.save_pretrained(tmp_path / kind)
    columns = {"columns": {"text": "text"}} if task == "masked-lm" else {}
    spec = tiny.job(tmp_path / kind, reviews, task=task, dataset={"source": str(reviews), "max_length": 32} | columns)
    assert "the checkpoint lacks" in refused(tiny.bundle, spec, "lora")
    assert tiny.bundle(spec, "full").model is not None


def test_tokens_without_an_embedding_are_told(tmp_path: Path, llama: Path, reviews: Path) -> None:
    bundle = tiny.bundle(tiny.job(llama, reviews, task="sequence-classification"), "lora")
    config, tokenizer, data = bundle.model.config, bundle.tokenizer, bundle.data
    check_padding(config.vocab_size, tokenizer)
    assert "have another token pad" in refused(check_padding, tokenizer.pad_token_id, tokenizer)
    check_vocabulary(config, tokenizer, [data.train])
    config.vocab_size = max(data.train.ids)
    assert f"token {config.vocab_size} of its tokenizer" in refused(check_vocabulary, config, tokenizer, [data.train])


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # by peft
def test_names_that_no_module_has_are_noted(llama: Path, reviews: Path) -> None:
    """A misspelt one makes a smaller adapter, which is faster."""
    for names, count in ((["q_proj", "v_proj"], 0), (["q_proj", "zzz"], 1)):
        spec = tiny.job(llama, reviews, task="sequence-classification", lora={"target_modules": names})
        told = unmatched_modules(spec, tiny.bundle(spec, "lora").model)
        assert len(told) == count
    assert told[0].startswith("lora.target_modules: the model has no 'zzz'; it has down_proj, gate_proj, ")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # by peft
@pytest.mark.parametrize("made", [transformers.Llama4TextConfig, transformers.PhimoeConfig])
def test_an_adapter_of_all_linear_layers_takes_no_router(
    tmp_path: Path, functions: Path, made: Callable[..., Any]
) -> None:
    """peft adapts the routers of these models as well, and each trial would fail at its first batch."""
    shape = {**tiny.SHAPE, **tiny.IDS, "num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = transformers.AutoModelForCausalLM.from_config(made(**shape, intermediate_size_mlp=96))
    model.save_pretrained(tmp_path / "model")
    source = tiny.with_tokenizer(tmp_path / "model")
    told = refused(tiny.bundle, tiny.job(source, functions), "lora")
    assert "all-linear takes this model's router" in told and "k_proj, o_proj, q_proj, " in told
    spec = tiny.job(source, functions, lora={"target_modules": ["q_proj", "v_proj"]})
    assert tiny.bundle(spec, "lora").model is not None
