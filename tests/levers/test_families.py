"""Model families: packing keeps samples apart, adapters learn, layers compile, padding changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Outcome
from service.contract.states import Origin
from service.contract.task import TrialRequest
from service.levers import LEVERS
from tests.child import tiny
from tests.factory import configuration
from training.errors import TrainingError
from worker.child import measure, steps
from worker.child.arrange import plan_of
from worker.child.build import Bundle, recipe_of
from worker.child.lacking import Lacking, class_of, lacking, lacking_in_vocabulary
from worker.child.memory_estimate import simulable, step_sizes

SAMPLES = list(range(6))
SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 8}),
    "mistral": ("MistralConfig", {"num_key_value_heads": 2}),
    "gemma3": ("Gemma3TextConfig", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 32}),
    "phi": ("PhiConfig", {}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
# A trial of these is run to its end, and no more.
TRIED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 32}),
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", {}),
    "distilbert": ("DistilBertConfig", {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}),
    "roberta": ("RobertaConfig", {"max_position_embeddings": 260}),
    "modernbert": ("ModernBertConfig", {"global_attn_every_n_layers": 2, "local_attention": 32}),
}
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout": 0.0}
NO_DROPOUT |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "seq_classif_dropout": 0.0}
FAMILIES = [*CAUSAL, *ENCODERS]
# tests/levers/test_conformance.py compiles a Llama's layers and a BERT's, which RoBERTa's are. A Mistral's layers are a
# Llama's, a Qwen3's are made of a Qwen3-MoE's attention and a Llama's MLP, and a Mixtral's of a Llama's attention and
# experts that run the same code as a Qwen3-MoE's.
COMPILED_ELSEWHERE = ("llama", "bert", "roberta", "mistral", "qwen3", "mixtral")
TASKS = {"causal-lm": "AutoModelForCausalLM", "sequence-classification": "AutoModelForSequenceClassification"}
TASKS |= {"masked-lm": "AutoModelForMaskedLM"}


def folder_of(family: str, task: str, folder: Path) -> Path:
    """A model's folder with seeded weights, and a tokenizer that has a mask token."""
    import transformers

    name, more = (CAUSAL | TRIED | ENCODERS)[family]
    kind = getattr(transformers, name)
    # How many tokens each expert gets decides how often a compiled layer is traced anew; with few tokens, too often.
    tokens = tiny.VOCAB + 1 if any("experts" in one for one in more) else tiny.FEW
    shape = {"vocab_size": tokens, "max_position_embeddings": 256} | SHAPE | NO_DROPOUT | tiny.IDS | more
    # Larger weights than usual: attention across samples then changes the logits visibly.
    config = kind(**shape, initializer_range=0.15, num_labels=3)
    torch.manual_seed(0)
    getattr(transformers, TASKS[task]).from_config(config, dtype=torch.float32).save_pretrained(folder)
    tiny.with_tokenizer(folder, tokens)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if task == "masked-lm":
        tokenizer.mask_token = tokenizer.convert_ids_to_tokens(3)
        tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Folders by family and task, made when first asked for."""
    return {}


@pytest.fixture
def job(
    made: dict[tuple[str, str], Path], tmp_path_factory: pytest.TempPathFactory, functions: Path, reviews: Path
) -> Any:
    """Makes the job of a family and a task."""

    def of(family: str, task: str = "") -> JobSpec:
        task = task or ("sequence-classification" if family in ENCODERS else "causal-lm")
        if (family, task) not in made:
            made[family, task] = folder_of(family, task, tmp_path_factory.mktemp("families") / family)
        data = functions if task == "causal-lm" else reviews
        return tiny.job(made[family, task], data, task=task, search={"verify": "quick"})

    return of


@pytest.fixture
def build(job: Any) -> Any:
    """Builds a family's bundle."""

    def of(family: str, task: str = "", method: str = "full", **levers: Any) -> Bundle:
        return tiny.bundle(job(family, task), method, **levers)

    return of


@pytest.mark.parametrize("family", [*CAUSAL, *TRIED])
def test_a_trial_runs_to_its_end(job: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline, and what a CPU tries first: built, probed, compared at step 0, and timed."""
    spec, device = job(family), tiny.device()
    found: Measurement | None = None
    monkeypatch.setattr(measure, "unit_size", lambda *_: 16)
    capacity = device.used() + (1 << 30)
    monkeypatch.setattr(device, "capacity", lambda: capacity)
    attention = "eager" if family == "gemma2" else "sdpa"
    place = tiny.workplace(Path(spec.model.source), Path(spec.dataset.source).parent)
    for batching in ("padded", "grouped"):
        request = TrialRequest(
            configuration=configuration("full", 8, precision="fp32", attention=attention, batching=batching),
            origin=Origin.recipe if found else Origin.baseline,
            number=1,
            confirm_largest=False,
            curve=False,
            passes=1,
            reference_loss=found.check_loss if found else None,
            reference_grad_norm=found.check_grad_norm if found else None,
        )
        found, _ = measure.run_trial(spec, request, device, place, lambda _: None)
        assert found.outcome is Outcome.ok and found.tokens_per_second and found.largest_micro_batch
        assert f"attention={attention}" not in found.lacks


def test_a_model_that_transformers_gives_no_sdpa_says_so_before_it_is_loaded(build: Any) -> None:
    with pytest.raises(Lacking, match="attention=sdpa cannot be .* Gemma2ForCausalLM does not support it") as refused:
        build("gemma2")
    assert {"attention=sdpa", "attention=sdpa-flash", "attention=varlen"} < set(refused.value.lacks)
    assert refused.value.blame == "configuration" and "attention=eager" not in refused.value.lacks


def test_an_estimate_takes_the_attention_that_transformers_takes(job: Any) -> None:
    spec = job("gemma2")
    assert step_sizes(spec, "full", simulable({}), 32, tiny.workplace(Path(spec.model.source))).peaks[0] > 0


@pytest.mark.parametrize(
    ("kind", "words"),
    [("T5Config", "t5 models have an encoder and a decoder"), ("ViTConfig", "no AutoModelForCausalLM for vit models")],
)
def test_a_model_that_no_task_trains_is_the_jobs_mistake(job: Any, kind: str, words: str) -> None:
    """So that the job ends with one sentence, and not with one a trial."""
    import transformers

    recipe = recipe_of(job("llama"), configuration())
    with pytest.raises(TrainingError, match=words) as refused:
        class_of(getattr(transformers, kind)(), recipe)
    assert refused.value.blame == "job"


def step_of(bundle: Bundle, micro: int = 3) -> steps.StepResult:
    """One step's loss and gradient norm, the weights left as they are."""
    (step,) = plan_of(bundle, SAMPLES, micro=micro, effective=len(SAMPLES))
    return steps.reference_step(bundle, step)


def same(first: steps.StepResult, second: steps.StepResult, away: float = 1e-5) -> None:
    assert first.loss == pytest.approx(second.loss, rel=away)
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=10 * away)


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("batching", ["packed", "sorted", "token-budget"])
def test_causal_arrangements_learn_the_same(build: Any, family: str, batching: str) -> None:
    reference = step_of(build(family))
    same(step_of(build(family, batching=batching)), reference)


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("batching", ["padded", "packed", "padding-free", "packed-global"])
def test_varlen_attention_keeps_samples_apart(build: Any, family: str, batching: str) -> None:
    reference = step_of(build(family))
    same(step_of(build(family, attention="varlen", batching=batching)), reference)


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
@pytest.mark.parametrize("experts", ["eager", "batched", "grouped"])
def test_experts_compute_the_same_in_every_way(build: Any, family: str, experts: str) -> None:
    bundle = build(family, experts=experts)
    assert bundle.model.config._experts_implementation.startswith(experts)
    same(step_of(bundle), step_of(build(family)))


def test_dropout_that_adapters_of_experts_cannot_have_is_named(job: Any) -> None:
    spec = job("mixtral")
    spec = spec.model_copy(update={"lora": spec.lora.model_copy(update={"dropout": 0.1})})
    with pytest.raises(TrainingError, match=r"^lora\.dropout: .* does not work with lora_dropout"):
        tiny.bundle(spec, "lora")


def test_a_model_says_what_it_lacks(build: Any) -> None:
    """So that no trial is spent on it, whatever it is trained with; asked for by name it is refused."""
    wanted = {f"experts={one}" for one in LEVERS["experts"].names[1:]} | {"normalisation=apex-fused"}
    assert set(lacking(build("llama", method="lora").model, "causal-lm")) == wanted
    for levers in ({"vocabulary": "multiple-64"}, {"head": "chunked"}, {"quantization": "int8", "precision": "bf16"}):
        assert set(lacking(build("llama", method="qlora", **levers).model, "causal-lm")) == wanted
    assert set(lacking(build("mixtral").model, "causal-lm")) == {"normalisation=apex-fused"}
    assert set(lacking_in_vocabulary(1000)) == {"vocabulary=multiple-8"}
    assert lacking_in_vocabulary(50_257) == {}
    softcapped = build("llama").model
    softcapped.config.final_logit_softcapping = 30.0
    assert {f"head={one}" for one in LEVERS["head"].names[1:]} < set(lacking(softcapped, "causal-lm"))
    bert = build("bert").model
    bert.config.attention_probs_dropout_prob = 0.1
    assert {"attention=varlen", "attention=flex"} < set(lacking(bert, "sequence-classification"))
    with pytest.raises(TrainingError, match="llama models have no experts"):
        build("llama", experts="eager")


@pytest.mark.parametrize("family", ENCODERS)
def test_varlen_attention_of_encoders(build: Any, family: str) -> None:
    for task in ("sequence-classification", "masked-lm"):
        same(step_of(build(family, task, attention="varlen")), step_of(build(family, task)))


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("batching", ["packed", "packed-global", "padding-free"])
def test_encoders_keep_packed_samples_apart(build: Any, family: str, batching: str) -> None:
    reference = step_of(build(family, "masked-lm"))
    same(step_of(build(family, "masked-lm", attention="varlen", batching=batching)), reference)


@pytest.mark.parametrize("family", CAUSAL)
def test_chunked_cross_entropy_and_a_padded_vocabulary_learn_the_same(build: Any, family: str) -> None:
    reference = step_of(build(family))
    for levers in (
        {"head": "chunked"},
        {"vocabulary": "multiple-64"},
        {"checkpointing": "every-2"},
        {"padding": "max"},
    ):
        same(step_of(build(family, **levers)), reference)


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("task", ["sequence-classification", "masked-lm"])
def test_encoders_learn_the_same_in_every_arrangement(build: Any, family: str, task: str) -> None:
    reference = step_of(build(family, task))
    assert reference.grad_norm > 0
    for levers in (
        {"batching": "sorted"},
        {"batching": "token-budget"},
        {"padding": "multiple-64"},
        {"attention": "eager"},
    ):
        same(step_of(build(family, task, **levers)), reference)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")  # GPT-2's Conv1D, which peft sees to
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # fused experts, which it leaves
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_learn_and_the_base_stays(build: Any, family: str, method: str) -> None:
    bundle = build(family, method=method)
    frozen = {name: one.clone() for name, one in bundle.model.named_parameters() if not one.requires_grad}
    before = steps.trained_sum(bundle.model)
    (step,) = plan_of(bundle, SAMPLES, micro=3, effective=len(SAMPLES))
    losses = [float(steps.optimizer_step(bundle, *steps.prepare(bundle, step)[:2])[0]) for _ in range(3)]
    assert losses[-1] < losses[0] and steps.trained_sum(bundle.model) != before
    assert frozen and all(
        torch.equal(one, frozen[name]) for name, one in bundle.model.named_parameters() if name in frozen
    )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("family", [one for one in FAMILIES if one not in COMPILED_ELSEWHERE])
def test_compiled_layers_compute_the_same(build: Any, family: str) -> None:
    """Each family's layers are traced and differentiated as for any backend; none generates code here, which takes most
    of the time. tests/levers/test_conformance.py has inductor's code, of a Llama's and a BERT's layers.

    Below an adapter the first layer's input needs no gradient, for which that layer would be traced once more; here
    it needs one, as those of all other layers do. All samples are one micro batch, since another shape, or one that
    needs no mask, would be traced once more as well. peft's adapters on experts, which a Qwen3-MoE's layers have, break
    a layer into a dozen graphs."""
    levers = {"batching": "packed" if family in CAUSAL else "padded"}
    reference = step_of(build(family, method="lora", **levers))
    bundle = build(family, method="lora", compile="per-layer-aot-eager", **levers)
    bundle.model.enable_input_require_grads()
    bundle.compile()
    same(step_of(bundle, micro=len(SAMPLES)), reference, 1e-4)
