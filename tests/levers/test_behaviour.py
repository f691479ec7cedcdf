"""What is seen of a model by running it before anything is measured: some do less than they have to, or more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from service.levers.batching import PACKED
from service.levers.head import WITHOUT_LOGITS
from tests.child import tiny
from training.batches import prepare
from training.errors import TrainingError
from training.samples import sample_of
from worker.child import steps
from worker.child.build import check_length
from worker.child.lacking import Lacking, lacking_attention

HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", HEADS),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_attention_heads": 4, "dropout": 0.0}),
    "lfm2": ("Lfm2Config", HEADS | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    "recurrent-gemma": ("RecurrentGemmaConfig", {"num_attention_heads": 4, "lru_width": 32, "logits_soft_cap": 3.0}),
    "bert": ("BertConfig", {"num_attention_heads": 4, "is_decoder": False}),
    "olmo": ("OlmoConfig", HEADS | {"clip_qkv": 3.0}),
    "nemotron": ("NemotronConfig", HEADS),
    "gpt-neox": ("GPTNeoXConfig", {"num_attention_heads": 4}),
    "bert-decoder": ("BertConfig", {"num_attention_heads": 4, "is_decoder": True}),
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attention_dropout": 0.0}


@pytest.fixture
def build(tmp_path: Path, functions: Path) -> Any:
    """Builds the bundle of a model and some levers."""

    def of(kind: str, method: str = "full", spread: float = 0.3, **levers: Any) -> Any:
        import transformers

        name, more = MODELS[kind]
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 256}
        config = getattr(transformers, name)(
            **(shape | {"vocab_size": tiny.FEW} | NO_DROPOUT | tiny.IDS | more), initializer_range=spread
        )
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / kind)
        return tiny.bundle(tiny.job(tiny.with_tokenizer(tmp_path / kind, tiny.FEW), functions), method, **levers)

    return of


def test_a_model_that_gives_its_mask_no_positions_is_not_packed(build: Any) -> None:
    """An OPT finds its positions in the attention mask, so attention does not know where samples begin."""
    assert build("opt", batching="sorted").model.training
    with pytest.raises(TrainingError, match="samples of one row see one another in models of kind opt with") as refused:
        build("opt", batching="packed")
    assert refused.value.blame == "configuration" and not isinstance(refused.value, Lacking)


def test_a_model_with_a_state_across_samples_is_packed_in_no_way(build: Any) -> None:
    """A convolution over the tokens does not know of samples either, whichever kernel attention takes."""
    with pytest.raises(Lacking, match="in models of kind lfm2, so it cannot be packed") as refused:
        build("lfm2", batching="padding-free", attention="varlen")
    assert set(refused.value.lacks) == {f"batching={choice}" for choice in PACKED}


@pytest.mark.parametrize("batching", PACKED)
def test_samples_that_are_kept_apart_may_be_packed(build: Any, batching: str) -> None:
    attention = "varlen" if batching == "padding-free" else "sdpa"
    assert build("llama", batching=batching, attention=attention, head="chunked").model.training


def test_a_state_is_seen_through_small_weights_as_well(build: Any) -> None:
    with pytest.raises(Lacking):
        build("lfm2", spread=0.05, batching="padding-free", attention="varlen")


@pytest.mark.parametrize("kind", ["llama", "gpt-neox"])
def test_what_8_bits_round_together_is_not_taken_for_tokens_that_are_seen(build: Any, kind: str) -> None:
    """A GPT-NeoX's configuration says that it is no decoder, although it is one."""
    for levers in ({"quantization": "int8"}, {"quantization": "nf4"}):
        assert build(kind, "qlora", batching="packed", head="chunked", **levers).model.training


def test_logits_that_are_changed_after_the_output_layer_are_seen(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under a name that no list has."""
    monkeypatch.setattr("training.levers.head.lacking_plain_logits", lambda _: None)
    monkeypatch.setattr("worker.child.lacking.lacking_plain_logits", lambda _: None)
    with pytest.raises(Lacking, match="changes its logits after its output layer") as refused:
        build("recurrent-gemma", head="chunked", attention="eager")
    assert set(refused.value.lacks) == {f"head={choice}" for choice in WITHOUT_LOGITS}


def test_a_model_that_sees_its_targets_is_the_jobs_mistake(build: Any) -> None:
    with pytest.raises(TrainingError, match="this bert model sees the tokens that causal-lm has it predict") as refused:
        build("bert")
    assert refused.value.blame == "job"
    assert build("bert-decoder").model.training


def test_a_model_that_does_not_divide_its_loss_is_the_jobs_mistake(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an XLNet does not, nor a model's own code that takes what it does not know and leaves it."""
    import transformers

    forward = transformers.LlamaForCausalLM.forward

    def ignoring(self: Any, *inputs: Any, num_items_in_batch: Any = None, **more: Any) -> Any:
        return forward(self, *inputs, **more)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", ignoring)
    with pytest.raises(
        TrainingError, match="this llama model does not divide its loss by the step's number"
    ) as refused:
        build("llama")
    assert refused.value.blame == "job"


def test_a_layer_that_writes_over_a_matmul_s_result_is_not_checkpointed_selectively(build: Any) -> None:
    """An OLMo clamps queries and keys in place. What is kept would be clamped, and its gradients by that not be."""
    with pytest.raises(
        Lacking, match=r"layers of olmo models write over the result of a matmul \(aten.clamp_"
    ) as found:
        build("olmo", checkpointing="selective")
    assert set(found.value.lacks) == {"checkpointing=selective"}
    for kind, choice in (("olmo", "full"), ("llama", "selective"), ("gpt-neox", "selective")):
        assert build(kind, checkpointing=choice).model.training


def test_a_model_that_tells_attention_nothing_has_no_varlen(build: Any) -> None:
    with pytest.raises(Lacking, match="nemotron models do not tell attention where samples end") as refused:
        build("nemotron", attention="varlen")
    assert set(refused.value.lacks) == {"attention=varlen"}


@pytest.mark.parametrize(("kind", "reads_padding"), [("XLNet", True), ("Bert", False), ("GPT2", False)])
def test_a_classifier_that_reads_padding_is_the_jobs_mistake(tmp_path: Path, kind: str, reads_padding: bool) -> None:
    """An XLNet reads its last token, and is made for padding on the left."""
    import transformers

    shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "XLNet":
        shape = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=tiny.FEW, num_labels=3, initializer_range=0.3, **shape, **tiny.IDS
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    folder, data = tiny.with_tokenizer(tmp_path / "model", tiny.FEW), tiny.write(tmp_path / "x.jsonl", tiny.classes(40))
    job = tiny.job(folder, data, task="sequence-classification")
    if not reads_padding:
        assert tiny.bundle(job, "full").model.training
        return
    with pytest.raises(TrainingError, match="this xlnet model classifies a text by its last token") as refused:
        tiny.bundle(job, "full", attention="eager")
    assert refused.value.blame == "job"


def test_varlen_attention_does_not_know_of_chunks() -> None:
    import transformers

    config = transformers.Llama4TextConfig(attention_chunk_size=8)
    assert "chunks of 8 tokens" in lacking_attention(config, None)["attention=varlen"]
    assert "attention=sdpa" not in lacking_attention(config, None)


def test_kernels_without_dropout_are_not_offered_to_models_that_drop_attention() -> None:
    import transformers

    def lacks(rate: float) -> set[str]:
        found = lacking_attention(transformers.BertConfig(attention_probs_dropout_prob=rate), None)
        return {name.removeprefix("attention=") for name, reason in found.items() if "no dropout" in reason}

    assert lacks(0.1) == {"flex", "varlen", "flash-attention-3"} and lacks(0.0) == set()


def test_a_roberta_s_positions_begin_after_its_padding_s_number() -> None:
    import transformers

    config = transformers.RobertaConfig(max_position_embeddings=34, pad_token_id=1)
    check_length(tiny.job(Path("model"), Path("data"), max_length=32), config)
    with pytest.raises(TrainingError, match="dataset.max_length is 33, but the model has positions for 32 tokens"):
        check_length(tiny.job(Path("model"), Path("data"), max_length=33), config)


def test_the_end_token_is_learnt_where_it_pads_as_well(tmp_path: Path, functions: Path) -> None:
    """A model that knew of the padding while it is made would give that token's embedding no gradient."""
    import transformers

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(
        **shape, **HEADS, vocab_size=tiny.FEW, max_position_embeddings=256, bos_token_id=1, eos_token_id=2
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    folder = tiny.with_tokenizer(tmp_path, tiny.FEW)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    bundle = tiny.bundle(tiny.job(folder, functions), "full")
    assert bundle.pad == bundle.tokenizer.eos_token_id == bundle.model.config.pad_token_id
    talk = [sample_of([5, 6, bundle.pad, 7, 8], [-100, 6, bundle.pad, 7, 8])]
    batches, terms, _ = prepare([[[0]]], talk, bundle.pad, bundle.recipe)
    steps.forward_backward(bundle, batches[0], torch.tensor(terms))
    assert bundle.model.get_input_embeddings().weight.grad[bundle.pad].abs().sum() > 0
